"""Prior of power from kernels: idle power, and energies of kernels over step time.

The load of a step is a sum over the kernels of its step-time prior. The prior is the sum of
energies at the full clock, which begins with what cards of known power share. Step times are those
of the device's own prior, so a step that waits for its host draws less. The limit is not in it:
heads are of one limit, and what it takes is left to residuals.

`research/priors/power.py --write` writes `known_power.safetensors` from the labels in `MEASURED`.
Any other card has its data sheet and the constants that these cards share, with their spread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Self

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trappm.learner.interface import Array, IntArray, Workload, join_tensors, with_prefix
from trappm.learner.physics.prior import PriorSpec, TermPrior
from trappm.learner.physics.step_time import Lookup, Peak, StepTimePrior, terms_of, times_of

SPILL = 1.5
"""Sharpness of the transition from cache to memory: half of the bytes go to memory where a kernel
touches as much as the last-level cache holds."""


@dataclass(frozen=True, eq=False)
class Loads:
    """Loads of n steps; each array except `operations` has one value per step."""

    products_ms: Array
    """Kernels that multiply."""
    streams_ms: Array
    """Kernels bound by memory, and the optimizer."""
    launch_ms: Array
    """Launch time in both, during which the device is nearly idle."""
    waiting_ms: Array
    """The host's work, for which the device waits where it is longer."""
    operations: Array
    """Operations by `Peak` (n, 3)."""
    bytes: Array
    """Bytes to and from memory, beyond the last-level cache."""

    @property
    def device_ms(self) -> Array:
        return self.products_ms + self.streams_ms

    def __len__(self) -> int:
        return len(self.bytes)

    def at(self, rows: IntArray) -> Loads:
        return Loads(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


def loads_of(workloads: Sequence[Workload], prior: StepTimePrior) -> Loads:
    """Return the loads of n workloads, as the constants of a device's step times have them.

    Raises:
        InputError: a workload without kernels.
    """
    spec, count = prior.spec, len(workloads)
    with torch.no_grad():
        terms = terms_of(workloads, spec)
        lookup = Lookup(prior.constants)
        times = times_of(terms, lookup, spec)
        products, streams = terms.products, terms.streams

        def summed(owner: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.float64).index_add(0, owner, values)

        def launches(which: int, owner: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            constant = lookup.pick("launch", torch.full_like(owner, which), owner)
            return summed(owner, counts * constant.exp() * spec.launch_us / 1e3)

        def in_memory(log_bytes: torch.Tensor) -> torch.Tensor:
            over = SPILL * (log_bytes - np.log(spec.cache_mib * 2**20))
            return torch.sigmoid(over) * log_bytes.exp()

        each = torch.arange(count)
        operations = torch.zeros(count * len(Peak), dtype=torch.float64).index_add(
            0,
            products.owner * len(Peak) + products.peak,
            products.count * products.log_flops.exp(),
        )
        values = {
            "products_ms": summed(products.owner, times.products),
            "streams_ms": summed(streams.owner, times.streams) + times.optimizer,
            "launch_ms": launches(0, products.owner, products.count)
            + launches(1, streams.owner, streams.count)
            + launches(2, each, terms.dispatches[:, 2]),
            "waiting_ms": times.host,
            "operations": operations.reshape(count, len(Peak)),
            "bytes": summed(products.owner, products.count * in_memory(products.log_bytes))
            + summed(streams.owner, streams.count * in_memory(streams.log_bytes))
            + terms.optimizer_bytes,
        }
    return Loads(**{name: value.numpy() for name, value in values.items()})


FILE = Path(__file__).parent / "known_power.safetensors"
MEASURED = {
    "v100": ("v100 pcie 32gb", "Zeus's training under limits, a V100 of 250 W (Apache-2.0)"),
    "p100": ("p100 pcie 16gb", "Zeus's training under limits, a P100 of 250 W (Apache-2.0)"),
    "h100": ("h100 sxm5", "our own labels of an H100 of 700 W, never at its limit"),
}
"""Basis by model of card: card whose data sheet its constants are relative to, and labels."""
LEARNED_FROM = (
    ("nodes/zeus_train_power.csv", "Zeus, V100 and P100", "Apache-2.0", 359),
    ("h100/sweeps", "trappm, one day of a GPU", "", 160),
)
"""File, source, licence and number of labels of what all of it was learned from."""
UNKNOWN = "other"


CONSTANTS = (
    "idle", "busy", "full", "half", "tf32", "bytes", "exponent", "floor", "streams", "products",
    "spread",
)  # fmt: skip
"""Their logarithms are what is learned. Of the limit as delivered: idle power, what is drawn more
while anything runs, what operations of each type draw at their peak, and bytes at the full
bandwidth. Then how dynamic energy falls with the clock, where it stops falling, how far kernels
bound by memory and those that multiply go with the clock, how far kernels lie around the mean."""


@dataclass(frozen=True, eq=False)
class Normal:
    """Normal distribution of the logarithms of a card's constants."""

    mean: Array
    """(c)."""
    covariance: Array
    """(c, c)."""


def write(known: Mapping[str, tuple[Normal, float]], path: Path = FILE) -> None:
    """Write constants and noise by model of card; those of others are of `UNKNOWN`."""
    tensors = {}
    for name, (normal, noise) in known.items():
        tensors[f"{name}.mean"] = torch.from_numpy(normal.mean.copy())
        tensors[f"{name}.covariance"] = torch.from_numpy(normal.covariance.copy())
        tensors[f"{name}.noise"] = torch.tensor(noise, dtype=torch.float64)
    save_file(tensors, path)


@cache
def known_power() -> dict[str, tuple[Normal, float]]:
    """Return constants and noise by model of card; those of other cards are of `UNKNOWN`."""
    tensors = load_file(FILE)
    return {
        name: (
            Normal(tensors[f"{name}.mean"].numpy(), tensors[f"{name}.covariance"].numpy()),
            float(tensors[f"{name}.noise"]),
        )
        for name in (*MEASURED, UNKNOWN)
    }


USUAL_W = 300.0
"""Share of a card's limit; a round number, since few labels determine the level."""
_SPREADS = {"idle": 0.3, "busy": 0.5, "full": 0.5, "half": 0.5, "tf32": 0.5, "bytes": 0.5}
"""Spread between cards (`research/priors/power_fit.py`), of the first of `CONSTANTS`."""
_SPEC = PriorSpec(_SPREADS, common_spread=0.7)


class PowerPrior(TermPrior):
    """See `learner.physics.prior.Prior`."""

    def __init__(
        self, times: StepTimePrior, full_w: Array, log_constants: Array | None = None
    ) -> None:
        """
        Args:
            times: of the device.
            full_w: before labels, what each term draws at its peak, in the order of `_SPREADS`.
            log_constants: as labels have moved them.
        """
        super().__init__(_SPEC, log_constants)
        self.times = times
        self.full_w = full_w

    @classmethod
    def with_times(cls, times: StepTimePrior) -> Self:
        """Return the prior of other cards' labels; labels of the card set its level."""
        return cls(times, USUAL_W * np.exp(known_power()[UNKNOWN][0].mean)[: len(_SPREADS)])

    @property
    def feature_groups(self) -> tuple[int, ...]:
        return (1, len(_SPREADS), *self.times.feature_groups)

    def with_constants(self, log_constants: Array) -> Self:
        return type(self)(self.times, self.full_w, log_constants)

    def terms(self, workloads: Sequence[Workload]) -> Array:
        if not len(workloads):
            return np.zeros((0, len(_SPREADS)))
        loads, spec = loads_of(workloads, self.times), self.times.spec
        time_s = np.exp(self.times.log_values(workloads)) / 1e3
        peaks = [spec.full_tflops, spec.half_tflops, spec.tf32_tflops or spec.full_tflops]
        shares = [
            np.ones(len(loads)),
            np.maximum(loads.device_ms - loads.launch_ms, 0.0) / 1e3 / time_s,
            *(loads.operations / (np.array(peaks) * 1e12) / time_s[:, None]).T,
            loads.bytes / (spec.bandwidth_gbs * 1e9) / time_s,
        ]
        terms: Array = np.stack(shares, axis=1) * self.full_w
        return terms

    def features_of(self, workloads: Sequence[Workload], logs: Array, shares: Array) -> Array:
        """Return the power and the shares of terms and kernels (n, f)."""
        return np.hstack([logs[:, None], shares, self.times.features(workloads)])

    def tensors(self) -> dict[str, Tensor]:
        times = join_tensors({"times": self.times})
        return {**super().tensors(), **times, "full_w": torch.from_numpy(self.full_w.copy())}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        times = StepTimePrior.from_tensors(with_prefix(tensors, "times."))
        full_w = tensors["full_w"].numpy()
        if full_w.shape != (len(_SPREADS),) or not np.all(np.isfinite(full_w) & (full_w > 0)):
            raise ValueError(f"power in W that is not positive: {full_w}")
        return cls(times, full_w, tensors["log_constants"].numpy())


if CONSTANTS[: len(_SPREADS)] != tuple(_SPREADS):
    raise ValueError("the terms of power are the first constants of a card")
