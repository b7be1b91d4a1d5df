"""The load of a step: a sum over the kernels of its step-time prior (`step_time`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from trappm.learner.physics.step_time import Lookup, Peak, StepTimePrior, terms_of, times_of
from trappm.learner.workload import Array, IntArray, Workload

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
    """The loads of n workloads, as the constants of a device's step times have them.

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
