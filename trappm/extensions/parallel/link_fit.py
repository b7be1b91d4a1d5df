"""A link as the collectives that were timed on it say: its constants, fitted.

The constants of the link's kind are where the fit begins, and what it keeps to where collectives
say nothing: what a doubled number of ranks adds where there was one number only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares  # type: ignore[import-untyped]

from trappm.extensions.parallel.collective_times import Group
from trappm.extensions.parallel.links import Link, Node
from trappm.profiler.kernels.kernel_call import KernelMeasurement, Operator
from trappm.profiler.records import Outcome

Array = npt.NDArray[np.float64]

LEAST = 6
"""Collectives, below which none is fitted; a catalogue has 57."""
LARGE_BYTES = 1 << 20
"""Gradients' buckets and FSDP's blocks are larger than this: their errors are the link's spread."""
STIFFNESS = 0.2
"""Weight of where constants begin against one collective."""
TAIL = 0.1
"""Of the logarithm: errors beyond it count less."""
WIDTHS = {"latency_us": 1.5, "hop_us": 1.0, "efficiency": 1.0, "sharpness": 0.4}
"""How far each may move in the logarithm, where a link is not the usual one of its kind."""
LEAST_SPREAD = 0.05
"""Times of collectives vary by as much from run to run."""


@dataclass(frozen=True)
class TimedCollective:
    """A collective of so many ranks of a node, with its median."""

    operator: Operator
    ranks: int
    size_bytes: float
    time_ms: float

    def predicted_ms(self, link: Link) -> float:
        group = Group(node=Node(name="", inner=link, network=link), gpus=self.ranks)
        if self.operator is Operator.ALL_REDUCE:
            return group.all_reduce_ms(self.size_bytes)
        if self.operator is Operator.ALL_GATHER:
            return group.all_gather_ms(self.size_bytes)
        return group.reduce_scatter_ms(self.size_bytes)


def collectives_of(measurements: Iterable[KernelMeasurement]) -> list[TimedCollective]:
    """Those that can be trusted: of outcome `ok`."""
    return [
        TimedCollective(m.call.operator, m.call["ranks"], 4.0 * m.call["elements"], m.time_ms)
        for m in measurements
        if m.call.form.is_collective and m.outcome is Outcome.OK and m.time_ms
    ]


def fitted_link(start: Link, timed: Sequence[TimedCollective]) -> Link | None:
    """The most probable link, with long-tailed errors of the logarithm; None of too few.

    Args:
        start: the usual link there, whose `gbs` is kept.
        timed: by all numbers of ranks that were tried.
    """
    if len(timed) < LEAST or max(each.size_bytes for each in timed) < LARGE_BYTES:
        return None
    names = [
        name
        for name in WIDTHS
        if getattr(start, name) > 0 and (name != "hop_us" or len({t.ranks for t in timed}) > 1)
    ]
    widths = np.array([WIDTHS[name] for name in names])

    def moved(logs: Array) -> Link:
        factors = zip(names, np.exp(logs).tolist(), strict=True)
        return replace(start, **{name: getattr(start, name) * by for name, by in factors})

    def errors(link: Link, chosen: Sequence[TimedCollective]) -> Array:
        return np.log([each.predicted_ms(link) / each.time_ms for each in chosen])

    def residuals(logs: Array) -> Array:
        return np.concatenate([errors(moved(logs), timed), STIFFNESS * logs / widths])

    best = least_squares(residuals, np.zeros(len(names)), loss="soft_l1", f_scale=TAIL)
    link = moved(best.x)
    large = errors(link, [each for each in timed if each.size_bytes >= LARGE_BYTES])
    return replace(link, spread=max(float(np.sqrt(np.mean(large**2))), LEAST_SPREAD))
