"""Step times of transformers on cards with published steps of language models.

Device constants were learned from image models: short attention, products of moderate size, and
small batches that waited for the host. In 16 bits, factors are fitted to llm-foundry's published
steps (Apache-2.0) of MPT on A100 and H100 nodes with flash attention, and for the A100 to
aiconfigurator's kernels (Apache-2.0), too. `python -m research tables language-models --fit` prints
them. In fp32 nothing is fitted, and NeuSight's whole models (MIT) give the errors of the constants.
Intervals are the errors on held-out language models, or hold most published steps (A100 in 16
bits), and are widened by the range of launch times on unknown hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
from torch import Tensor

from trappm.extensions.transformers.model_names import is_transformer
from trappm.learner.heads.physics_heads import Head, Heads, OtherDevices, head_of
from trappm.learner.interface import Z90, Estimate, TrainedHeads, Workload
from trappm.learner.physics.prior import Prior
from trappm.learner.physics.step_time import PRODUCT_KINDS, Peak, StepTimePrior, group_rows
from trappm.learner.stats.calibration import LEVELS, Calibration
from trappm.prediction.models import size_kind
from trappm.profiler.devices.catalogue import DeviceSpec, known_spec, read_name
from trappm.profiler.models.pool import is_megatron
from trappm.profiler.records import Precision
from trappm.profiler.traced_step import KernelKind

Array = npt.NDArray[np.float64]

LAUNCH_US = (3.0, 6.0)
"""Minimum time of a product kernel and of another kernel on a device that does not wait."""
DISPATCH_US = 30.0
"""Host time per eager PyTorch operator, rounded from an H100 node like `LAUNCH_US`
(docs/research/step_time.md); launches in older image labels include the time of slower hosts."""
OLDER_DISPATCH_US = 37.0
"""The same on nodes of A100, V100 and T4: geometric mean of nine published models whose steps wait
for the host (docs/research/step_time.md)."""
HOST_RANGE = 2.0
"""Assumed ratio between the fastest or slowest and a typical host, a rounded value."""


@dataclass(frozen=True, kw_only=True)
class TransformerTimes:
    """Factors on the times from a device's constants, with their errors."""

    products: float = 1.0
    """Factor on large products in 16 bits."""
    attention: float = 1.0
    """Factor on fused attention."""
    copies: float = 1.0
    """Factor on copies, such as those of a growing cache."""
    dispatch_us: float = DISPATCH_US
    contention: float = 0.0
    """Slowdown of compute as a share of the time of an overlapped collective."""
    errors: tuple[float, float]
    """90 % interval of measured / predicted on held-out models. The A100's was chosen to hold
    fms-acceleration's steps and most of llm-foundry's."""
    basis: str
    """Source of the factors in words."""
    like: str = ""
    """Card model whose constants are used instead of the card's own, if any."""

    def moved(self, constants: Tensor, spec: DeviceSpec, slower: float = 1.0) -> Tensor:
        """Return device constants (c) for a transformer step on a host slower by a factor."""
        moved = constants.clone()
        rows = {group.name: where for group, where in group_rows()}
        moved[rows["peak"].start + Peak.HALF] += log(self.products)
        attention = rows["slowdown"].start + KernelKind.ATTENTION
        moved[attention] += log(self.attention / self.products)
        for place, launch_us in enumerate(LAUNCH_US):
            moved[rows["launch"].start + place] = log(slower * launch_us / spec.launch_us)
        for place in range(2):  # forward and backward; the optimizer has other operators
            dispatch_us = slower * self.dispatch_us
            moved[rows["dispatch"].start + place] = log(dispatch_us / spec.dispatch_us)
        moved[rows["stream"].start + KernelKind.COPY - PRODUCT_KINDS] += log(self.copies)
        # Softmax of image models in 16 bits is slow, because its rows are short and odd. Rows of
        # language models reach the bandwidth that they reach in fp32.
        moved[rows["stream_half"].start + KernelKind.SOFTMAX - PRODUCT_KINDS] = 0.0
        return moved


FLASH_2 = 1.331
"""Factor on an A100's attention, from aiconfigurator's kernels of FlashAttention 2, which PyTorch
has since 2.2. llm-foundry's steps with an older attention imply 2.114."""
STEPS_OF_2023, KERNELS_OF_TODAY = 1.079, 0.829
"""Factors on an A100's products, of llm-foundry's steps and of aiconfigurator's kernels. Published
steps since confirm both, by their software, so answers have the geometric mean."""
_FULL_ERRORS = (0.961, 1.164)
"""90 % interval of measured / predicted of NeuSight's models in fp32
(docs/research/step_time.md)."""
_HALF = "published steps of language models in bf16 (llm-foundry)"
_FLASH = f"{_HALF} and FlashAttention 2's kernels"
_KERNELS = f"{_HALF} and kernels of today's libraries (aiconfigurator)"
_FULL = "published whole language models in fp32, with eager attention (NeuSight)"
_IMAGES = "published inference of transformers' image models in fp32 on A100, V100 and T4"
KNOWN = {
    ("a100", True): TransformerTimes(
        products=(STEPS_OF_2023 * KERNELS_OF_TODAY) ** 0.5,
        attention=FLASH_2,
        dispatch_us=OLDER_DISPATCH_US,
        contention=0.046,
        errors=(0.88, 1.30),
        basis=_KERNELS,
    ),
    ("h100", True): TransformerTimes(
        products=1.436, attention=2.863, contention=0.168, errors=(0.941, 1.085), basis=_HALF
    ),
    **{
        (card, False): TransformerTimes(
            dispatch_us=OLDER_DISPATCH_US, errors=_FULL_ERRORS, basis=_FULL
        )
        for card in ("v100", "t4", "a100")
    },
    ("h100", False): TransformerTimes(errors=_FULL_ERRORS, basis=_FULL),
    # Both are limited to about 70 W, which keeps their clocks far below the data sheets.
    ("l4", False): TransformerTimes(errors=_FULL_ERRORS, basis=_FULL, like="t4"),
}
"""Factors by card model and by whether the step is in 16 bits."""
OF_2023 = {
    ("a100", True): replace(
        KNOWN["a100", True], products=STEPS_OF_2023, errors=(0.80, 1.17), basis=_FLASH
    )
}
"""The same with libraries of 2021 to 2023, as in published runs of Megatron-LM and generation."""

IMAGE_CARDS = ("a100", "v100", "t4")
IMAGE_ERRORS = (0.88, 1.14)
"""90 % interval of measured / predicted of transformers' image models in fp32, chosen to hold most
published steps on these cards."""

OTHER_TIMES = TransformerTimes(
    attention=FLASH_2, errors=(0.5, 2.0), basis="no step of a language model"
)
"""Factors of other cards in 16 bits."""


def transformer_times(
    device: str, precision: Precision, *, of_2023: bool = False
) -> TransformerTimes | None:
    """Return the factors of a device; None without published steps of language models on it.

    Args:
        device: Any name of the device.
        precision: Precision of the step.
        of_2023: Whether libraries are of 2021 to 2023, where that makes a difference.
    """
    key = read_name(device).model, not precision.is_fp32
    return (OF_2023.get(key) if of_2023 else None) or KNOWN.get(key)


@dataclass(frozen=True, eq=False)
class LanguageModelHead(Head[Prior]):
    """Head without residual, with an interval that includes slower and faster hosts."""

    slow_host: Prior | None = None
    """Prior of the card on a host that is slower by `HOST_RANGE`."""
    fast_host: Prior | None = None

    def predict(self, workloads: Sequence[Workload]) -> Estimate:
        made = super().predict(workloads)
        assert made.low is not None  # noqa: S101  (heads state intervals)
        assert made.high is not None  # noqa: S101
        low = self._widen_bound(made.median, made.low, self.fast_host, workloads)
        high = self._widen_bound(made.median, made.high, self.slow_host, workloads)
        return replace(made, low=low, high=high, log_std=np.log(high / low) / (2 * Z90))

    @staticmethod
    def _widen_bound(
        median: Array, bound: Array, other: Prior | None, workloads: Sequence[Workload]
    ) -> Array:
        """Return a bound widened by the effect of another host, assumed independent."""
        if other is None:
            return bound
        own, hosts = np.log(bound / median), other.log_values(workloads) - np.log(median)
        both: Array = median * np.exp(np.sign(own + hosts) * np.hypot(own, hosts))
        return both


def model_heads(
    architecture: str,
    trained: TrainedHeads,
    others: OtherDevices,
    card: str,
    precision: Precision,
) -> tuple[TrainedHeads, str] | None:
    """Return heads whose step times come from published steps of language models.

    Args:
        architecture: Name of the model.
        trained: Heads of the card for any model.
        others: Constants of all cards.
        card: Name of the card in the catalogue.
        precision: Precision of the step.

    Returns:
        The heads and the source of their step times; None for models other than transformers, and
        without published steps for the card and precision.
    """
    if not is_transformer(architecture):
        return None
    times = transformer_times(card, precision, of_2023=is_megatron(architecture))
    spec = known_spec(card)
    if times is None or spec is None or not isinstance(trained.heads, Heads):
        return None
    is_of_images = size_kind(architecture) != "tokens" and precision is Precision.FP32
    if is_of_images and read_name(card).model in IMAGE_CARDS:
        times = replace(times, errors=IMAGE_ERRORS, basis=_IMAGES)
    head = language_model_head(others, card, spec, times, errors_of(times))
    known = trained.heads
    heads = replace(known, heads={**known.heads, "step_time_ms": head})
    return replace(trained, heads=heads), times.basis


def contention(architecture: str, card: str, precision: Precision) -> float:
    """Return the slowdown of the step as a share of overlapped collectives; 0 if unknown."""
    times = transformer_times(card, precision) if is_transformer(architecture) else None
    return 0.0 if times is None else times.contention


def language_model_head(
    others: OtherDevices, card: str, spec: DeviceSpec, times: TransformerTimes, errors: Calibration
) -> LanguageModelHead:
    """Return the step time head of transformers on a card.

    Args:
        others: Constants of all cards.
        card: Name of the card in the catalogue.
        spec: Data sheet of the card.
        times: Factors from published steps of language models.
        errors: Quantiles of log(measured / predicted) on a typical host.
    """
    constants = others.constants_of(times.like or card)
    priors = [
        StepTimePrior(spec, times.moved(constants, spec, slower))
        for slower in (1.0, HOST_RANGE, 1 / HOST_RANGE)
    ]
    plain = head_of(priors[0], errors)
    return LanguageModelHead(**vars(plain), slow_host=priors[1], fast_host=priors[2])


def errors_of(times: TransformerTimes) -> Calibration:
    """Return quantiles of log(measured / predicted) that match a 90 % interval of errors."""
    deviations = np.log(times.errors) / Z90
    normal = np.array([NormalDist().inv_cdf(level) for level in LEVELS.tolist()])
    return Calibration(np.abs(normal) * np.where(normal < 0, deviations[0], deviations[1]))
