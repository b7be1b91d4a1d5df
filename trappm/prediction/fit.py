"""Decide whether a step fits a device, and which batch is the largest: one rule for every command.

A step *fits* if the upper bound of the 90 % interval of its memory is within the usable memory of
the device, `USABLE_SHARE` of its capacity. It *may not fit* if only the median is within it. It
*does not fit* if the median is not. The *largest batch* is the largest batch size that fits.

The interval of a step like labelled ones is that of its heads. The interval of any other step
comes from its simulated memory and the errors of the simulation on cards without labels.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import exp
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from trappm.prediction.selection import refuse_unnamed, unknown_device
from trappm.profiler.devices.catalogue import USABLE_SHARE, card_capacity_mib, process_memory_mib
from trappm.profiler.errors import InputError
from trappm.profiler.records import Phase, is_cpu_device

if TYPE_CHECKING:
    from trappm.learner.stats.calibration import Calibration

LEAST_RESERVE = round(1 - USABLE_SHARE, 6)
"""Share of a device's memory that no fitting step takes."""
MAX_BATCH = 65_536
"""Upper end of the search for the largest batch."""
_FIRST_SIZES = 1, 64
"""Batch sizes that others are interpolated from at first (round numbers)."""
_MIB_PER_GIB = 1024


class Verdict(enum.StrEnum):
    """Verdict on a step."""

    FITS = "fits"
    MAY_NOT_FIT = "may not fit"
    DOES_NOT_FIT = "does not fit"


VERDICTS = {Verdict.FITS: "yes", Verdict.MAY_NOT_FIT: "maybe", Verdict.DOES_NOT_FIT: "no"}
"""The same in a column of a table."""


class MemoryInterval(NamedTuple):
    """Memory of a step: the median and the bounds of its 90 % interval."""

    median_mib: float
    low_mib: float
    high_mib: float

    def verdict(self, capacity_mib: float) -> Verdict:
        """Return whether a step with this memory fits a device with this capacity."""
        usable_mib = USABLE_SHARE * capacity_mib
        if self.high_mib <= usable_mib:
            return Verdict.FITS
        return Verdict.MAY_NOT_FIT if self.median_mib <= usable_mib else Verdict.DOES_NOT_FIT

    def __str__(self) -> str:
        """Such as `8.3 GiB (8.0 to 8.6)`, or `779 MiB (740 to 812)` below 1 GiB."""
        if self.median_mib < _MIB_PER_GIB:
            median, low, high = (f"{value:,.0f}" for value in self)
            return f"{median} MiB ({low} to {high})"
        median, low, high = (f"{value / _MIB_PER_GIB:,.1f}" for value in self)
        return f"{median} GiB ({low} to {high})"

    def of(self, capacity_mib: float) -> str:
        """Such as `8.3 GiB (8.0 to 8.6) of 39.6`."""
        unit = " GiB" if self.median_mib < _MIB_PER_GIB else ""
        return f"{self} of {capacity_mib / _MIB_PER_GIB:,.1f}{unit}"


class MemoryAnswer:
    """Mixin of records with a memory, its interval, and the capacity of the device."""

    memory_mib: float | None
    capacity_mib: float | None
    intervals: Mapping[str, tuple[float, float]]

    @property
    def memory(self) -> MemoryInterval | None:
        """Memory of the step with its interval; None if it is not predicted."""
        if self.memory_mib is None:
            return None
        return MemoryInterval(self.memory_mib, *self.intervals["memory_mib"])

    @property
    def verdict(self) -> Verdict | None:
        """Return the verdict on the step; None if its memory or the capacity is unknown."""
        memory = self.memory
        if memory is None or self.capacity_mib is None:
            return None
        return memory.verdict(self.capacity_mib)

    @property
    def fits(self) -> bool | None:
        """Return whether the verdict is that the step fits."""
        return None if self.verdict is None else self.verdict is Verdict.FITS


def largest_batch(
    memory: Callable[[int], MemoryInterval], capacity_mib: float, reserve: float = LEAST_RESERVE
) -> int:
    """Return the largest batch size that fits, at most `MAX_BATCH`; 0 if not even 1 does.

    Args:
        memory: Returns the memory of the step at a batch size.
        capacity_mib: Memory of the device.
        reserve: Share of this memory that the step must leave free.

    Raises:
        InputError: The reserve is not from `LEAST_RESERVE` to below 1.
    """
    if not LEAST_RESERVE <= reserve < 1:
        raise InputError(f"reserve is {reserve!r}; it must be from {LEAST_RESERVE} to below 1")
    capacity_mib *= (1 - reserve) / (1 - LEAST_RESERVE)  # of which the verdict leaves the rest

    def fits(size: int) -> bool:
        return memory(size).verdict(capacity_mib) is Verdict.FITS

    memory = cache(memory)
    # Rounded segments can take more at a smaller batch, so one that may not fit is no end yet.
    fitting, beyond = 0, 1
    while beyond <= MAX_BATCH and memory(beyond).low_mib <= USABLE_SHARE * capacity_mib:
        fitting, beyond = (beyond if fits(beyond) else fitting), 2 * beyond
    while fitting and beyond - fitting > 1:
        middle = (fitting + beyond) // 2
        fitting, beyond = (middle, beyond) if fits(middle) else (fitting, middle)
    return min(fitting, MAX_BATCH)


def largest_batch_of_many(
    memories: Callable[[Sequence[int]], Sequence[MemoryInterval]], capacity_mib: float
) -> int:
    """Return the same as `largest_batch` from few predictions of many batch sizes each.

    The search is repeated on memories that are interpolated where they are unknown. What it needed
    is predicted together, until all of it is known. A batch surely fits if a larger one takes at
    most half of the usable memory.

    Args:
        memories: Returns the memory of the step at each of several batch sizes.
        capacity_mib: Memory of the device.
    """
    known: dict[int, MemoryInterval] = {}
    unknown, largest = [*_FIRST_SIZES], 0
    half_mib = USABLE_SHARE * capacity_mib / 2

    def memory(size: int) -> MemoryInterval:
        if size in known:
            return known[size]
        for other, interval in known.items():
            if other > size and interval.high_mib <= half_mib:
                return interval
        unknown.append(size)
        return _interpolate(known, size)

    while unknown:
        known.update(zip(unknown, memories(unknown), strict=True))
        unknown.clear()
        largest = largest_batch(memory, capacity_mib)
    return largest


def _interpolate(known: Mapping[int, MemoryInterval], size: int) -> MemoryInterval:
    """Return the memory on the line through batch size 1 and the nearest of the other known ones.

    Not the two nearest ones: they can be so close that steps of the allocator hide the slope.
    """
    nearest = min(known.keys() - {1}, key=lambda other: abs(other - size))
    share = (size - 1) / (nearest - 1)
    both = zip(known[1], known[nearest], strict=True)
    return MemoryInterval(*(first + share * (value - first) for first, value in both))


def simulated_interval(simulated_mib: float, log_error: float | None = None) -> MemoryInterval:
    """Return the interval of a simulated memory.

    Args:
        simulated_mib: Memory of the step and its process.
        log_error: Bound of the logarithm's error (default: the errors on unlabelled cards).
    """
    low, high = _simulation().interval() if log_error is None else (-log_error, log_error)
    return MemoryInterval(simulated_mib, simulated_mib * exp(low), simulated_mib * exp(high))


def simulated_risk(
    simulated_mib: npt.NDArray[np.float64], capacity_mib: float
) -> npt.NDArray[np.float64]:
    """Return the probability that simulated steps exceed a device's memory.

    Args:
        simulated_mib: Simulated memory of each step, shape (n,).
        capacity_mib: Memory of the device.
    """
    return _simulation().exceeding(np.log(USABLE_SHARE * capacity_mib / simulated_mib))


@cache
def _simulation() -> Calibration:
    """Return the quantiles of log(measured / simulated)."""
    from trappm.learner.heads.physics_heads import known_of_others

    return known_of_others()[0].memory


def limit_of_step_mib(device: str, phase: Phase, log_error: float | None = None) -> float | None:
    """Return the memory beyond which a simulated step may not fit; None without a capacity.

    PyTorch's allocator returns unused segments before it runs out of memory, so a step that would
    reserve more than this may still run (`simulate_memory`).

    Args:
        device: Any name of the device.
        phase: Phase of the step.
        log_error: As for `simulated_interval`.
    """
    capacity_mib = None if is_cpu_device(device) else card_capacity_mib(device)
    if capacity_mib is None:
        return None
    most_mib = USABLE_SHARE * capacity_mib / simulated_interval(1.0, log_error).high_mib
    return most_mib - process_memory_mib(device, phase)


def room_text(verdict: Verdict, device: str, memory: MemoryInterval, capacity_mib: float) -> str:
    """Return such as `Fits A100 40 GB: 8.3 GiB (8.0 to 8.6) of 39.6`.

    If the step may not fit, the text has the usable memory, too.
    """
    text = f"{verdict.capitalize()} {device}: {memory.of(capacity_mib)}"
    if verdict is not Verdict.MAY_NOT_FIT:
        return text
    return f"{text}, {USABLE_SHARE * capacity_mib / _MIB_PER_GIB:,.1f} usable"


def capacity_of(device: str) -> float:
    """Return the memory of a card in MiB; raises InputError if no such card is known."""
    refuse_unnamed(device)
    if is_cpu_device(device):
        raise InputError(
            f"the memory of {device} depends on its host, so what fits is unknown; name a GPU, "
            "such as a100"
        )
    capacity = card_capacity_mib(device)
    if capacity is None:
        raise InputError(unknown_device(device))
    return capacity
