"""Link between the GPUs of a device, fitted to measured collectives or else from a typical node.

`trappm measure --kernels --device a100x4` times collectives and records them in the label store.
The fit starts at the constants of the link's kind; constants that the collectives do not determine
stay at these values.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trappm.extensions.parallel.links import Group, Link, Node, node_of
from trappm.profiler.devices.base import rank_key
from trappm.profiler.devices.catalogue import read_name
from trappm.profiler.errors import StoreError
from trappm.profiler.kernels.kernel_call import Operator
from trappm.profiler.records import Outcome, is_cpu_device

if TYPE_CHECKING:
    from trappm.profiler.kernels.kernel_call import KernelMeasurement

Array = npt.NDArray[np.float64]

LEAST = 6
"""Minimum number of collectives for a fit; a full measurement has 57."""
LARGE_BYTES = 1 << 20
"""Minimum size of gradient buckets and FSDP blocks; errors above it give the link's spread."""
STIFFNESS = 0.2
"""Weight of the starting constants relative to one collective."""
TAIL = 0.1
"""Scale of the robust loss: errors of the logarithm beyond it have less weight."""
WIDTHS = {"latency_us": 1.5, "hop_us": 1.0, "efficiency": 1.0, "sharpness": 0.4}
"""Prior standard deviation of the logarithm of each constant within a kind of link."""
LEAST_SPREAD = 0.05
"""Run-to-run standard deviation of the logarithm of collective times."""


@dataclass(frozen=True)
class TimedCollective:
    """A collective of n ranks of a node with its median time."""

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
    """Return the successful collectives among measured kernels."""
    return [
        TimedCollective(m.call.operator, m.call["ranks"], 4.0 * m.call["elements"], m.time_ms)
        for m in measurements
        if m.call.form.is_collective and m.outcome is Outcome.OK and m.time_ms
    ]


def fitted_link(start: Link, timed: Sequence[TimedCollective]) -> Link | None:
    """Return the most probable link under long-tailed log errors; None for too few collectives.

    Args:
        start: Link to start from; its `gbs` is not fitted.
        timed: Collectives of all measured numbers of ranks.
    """
    if len(timed) < LEAST or max(each.size_bytes for each in timed) < LARGE_BYTES:
        return None
    from scipy.optimize import least_squares  # type: ignore[import-untyped]

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


def known_node(device: str) -> tuple[Node, tuple[str, ...]]:
    """Return the node of a device, and remarks about its links.

    Raises:
        InputError: The GPU is not in the catalogue.
    """
    node = node_of(device)
    try:
        timed = _timed(device)
    except StoreError as error:
        return node, (f"links of a typical node, because the label store is unreadable: {error}",)
    link = characterised(node.inner, timed)
    return (node if link is None else replace(node, inner=link)), ()


def characterised(usual: Link, measurements: Sequence[KernelMeasurement]) -> Link | None:
    """Return the link fitted to these collectives; None if too few succeeded."""
    link = fitted_link(usual, collectives_of(measurements)) if measurements else None
    if link is None:
        return None
    keys = ", ".join(sorted({m.device for m in measurements}))
    newest = max(measurements, key=lambda m: m.started_at)
    how = "" if newest.provenance == "measured" else f" ({newest.provenance})"
    torch = newest.environment.get("torch", "?")
    source = f"characterised on {keys}{how}, {newest.started_at[:10]}, torch {torch}"
    return replace(link, source=source)


def link_sentence(device: str, measurements: Sequence[KernelMeasurement]) -> str:
    """Describe the link between the ranks of a device such as `a100x4` in one line.

    Raises:
        InputError: The GPU is not in the catalogue.
    """
    link = characterised(node_of(rank_key(device).member).inner, measurements)
    if link is None:
        return (
            f"{device}: too few successful collectives to fit the link between its ranks; measure "
            "them on an idle host"
        )
    return (
        f"{device}: latency {link.latency_us:.3g} us, bandwidth "
        f"{link.gbs * link.efficiency:.3g} GB/s per rank ({link.kind}, nominal {link.gbs:g} GB/s); "
        f"times from 1 MiB vary by {link.spread:.0%}; {link.source}"
    )


def _timed(device: str) -> list[KernelMeasurement]:
    """Return the last successful attempt of each collective between devices of this kind."""
    if importlib.util.find_spec("sqlalchemy") is None:  # then there is no label store either
        return []
    from trappm.label_store import store_or_none_yet
    from trappm.store import Home

    with store_or_none_yet(Home.find()) as store:
        keys = [key for key in store.kernels.devices() if rank_key(key).ranks > 1]
        timed = [m for key in keys for m in store.kernels.latest(key)]
    return [m for m in timed if _is_of(m, device)]


def _is_of(measurement: KernelMeasurement, device: str) -> bool:
    member = rank_key(measurement.device).member
    if is_cpu_device(device) or is_cpu_device(member):
        return member == device
    name = str(measurement.environment.get("device_name") or member)
    return read_name(name).may_be(read_name(device))
