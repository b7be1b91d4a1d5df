"""What steps of language models say of a device's kernels, beside its other labels.

Constants of devices were learned from images: of attention over some hundred tokens, of products of
moderate size, and on hosts that small batches waited for. In 16 bits factors are fitted to
llm-foundry's published steps (Apache-2.0) of MPT on A100 and H100 nodes, with flash attention;
`research/priors/language_models.py --fit` prints them. In fp32 nothing is fitted, and NeuSight's
whole models (MIT) tell how far off the constants are.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

from torch import Tensor

from trappm.learner.physics.device_specs import DeviceSpec
from trappm.learner.physics.kernel_terms import Peak
from trappm.learner.physics.kernel_times import group_rows
from trappm.profiler.devices.catalogue import read_name
from trappm.profiler.records import Precision
from trappm.profiler.simulation.kernel_profile import KernelKind

LAUNCH_US = (3.0, 6.0)
"""Least time of a kernel that multiplies, and of another, on a device whose host keeps up."""
DISPATCH_US = 30.0
"""Of the host, for an operator of eager PyTorch. Both are those of our own H100 node, rounded
(docs/studies/h100_day.md); older labels of images have what slower hosts cost in their launches."""
HOST_RANGE = 2.0
"""Hosts are up to so many times faster or slower: a round number, between sheets that we know."""


@dataclass(frozen=True, kw_only=True)
class TransformerTimes:
    """Factors of the times that a device's constants give, and how far off they are."""

    products: float = 1.0
    """Of large products in 16 bits."""
    attention: float = 1.0
    """Of fused attention."""
    contention: float = 0.0
    """Share of a hidden collective by which it slows what is computed beside it."""
    errors: tuple[float, float]
    """Measured over predicted on models held out: between these are 90 %."""
    basis: str
    """What it rests on, in words."""
    like: str = ""
    """The model of a card whose constants it takes, where images are no guide to its own."""

    def moved(self, constants: Tensor, spec: DeviceSpec, slower: float = 1.0) -> Tensor:
        """Constants of a device (c), for a step of a transformer on a host so much slower."""
        moved = constants.clone()
        rows = {group.name: where for group, where in group_rows()}
        moved[rows["peak"].start + Peak.HALF] += log(self.products)
        attention = rows["slowdown"].start + KernelKind.ATTENTION
        moved[attention] += log(self.attention / self.products)
        for place, launch_us in enumerate(LAUNCH_US):
            moved[rows["launch"].start + place] = log(slower * launch_us / spec.launch_us)
        for place in range(2):  # forward and backward; the optimizer's are of other operators
            moved[rows["dispatch"].start + place] = log(slower * DISPATCH_US / spec.dispatch_us)
        return moved


_HALF = "published steps of language models in bf16 (llm-foundry)"
_FULL = "published whole language models in fp32, with eager attention (NeuSight)"
KNOWN = {
    ("a100", True): TransformerTimes(
        products=1.457, attention=2.380, contention=0.048, errors=(0.904, 1.172), basis=_HALF
    ),
    ("h100", True): TransformerTimes(
        products=1.526, attention=3.133, contention=0.217, errors=(0.941, 1.080), basis=_HALF
    ),
    **{
        (card, False): TransformerTimes(errors=(0.960, 1.181), basis=_FULL)
        for card in ("v100", "t4", "a100", "h100")
    },
    # Both draw some 70 W, which bounds their clocks long before data sheets do.
    ("l4", False): TransformerTimes(errors=(0.960, 1.181), basis=_FULL, like="t4"),
}
"""By a card's model, and whether its step is in 16 bits."""

OTHERS = TransformerTimes(attention=1.9, errors=(0.5, 2.0), basis="no step of a language model")
"""Of other cards in 16 bits: those that are known agree on attention, so all are taken for it."""


def transformer_times(device: str, precision: Precision) -> TransformerTimes | None:
    """Those of a device; None where no published step of a language model is on it."""
    return KNOWN.get((read_name(device).model, precision is not Precision.FP32))
