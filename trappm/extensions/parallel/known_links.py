"""The links of a device: as its collectives say, where they were timed, else of the usual node.

`trappm measure --kernels --device a100x4` times them and keeps them in the label store.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trappm.extensions.parallel.links import Link, Node, node_of
from trappm.profiler.devices.base import rank_key
from trappm.profiler.devices.catalogue import read_name
from trappm.profiler.errors import StoreError
from trappm.profiler.records import is_cpu_device

if TYPE_CHECKING:
    from trappm.profiler.kernels.kernel_call import KernelMeasurement


def known_node(device: str) -> tuple[Node, tuple[str, ...]]:
    """The node of a device's cards, and what is to be said about its links.

    Raises:
        InputError: nobody has listed the card.
    """
    node = node_of(device)
    try:
        timed = _timed(device)
    except StoreError as error:
        return node, (f"links of the usual node, as the label store cannot be read: {error}",)
    link = characterised(node.inner, timed)
    if link is None:
        return node, ()
    return replace(node, inner=link), ()


def characterised(usual: Link, measurements: Sequence[KernelMeasurement]) -> Link | None:
    """The link that these collectives were timed on, saying so; None of too few good ones."""
    from trappm.extensions.parallel.link_fit import collectives_of, fitted_link

    link = fitted_link(usual, collectives_of(measurements)) if measurements else None
    if link is None:
        return None
    keys = ", ".join(sorted({m.device for m in measurements}))
    newest = max(measurements, key=lambda m: m.started_at)
    how = "" if newest.provenance == "measured" else f" ({newest.provenance})"
    torch = newest.environment.get("torch", "?")
    source = f"characterised on {keys}{how}, {newest.started_at[:10]}, torch {torch}"
    return replace(link, source=source)


def link_of(device: str, measurements: Sequence[KernelMeasurement]) -> Link | None:
    """The link between the ranks of a device such as `a100x4`, by its collectives.

    Raises:
        InputError: nobody has listed its card.
    """
    return characterised(node_of(rank_key(device).member).inner, measurements)


def link_sentence(device: str, measurements: Sequence[KernelMeasurement]) -> str:
    """What is known of that link, in a line."""
    link = link_of(device, measurements)
    if link is None:
        return (
            f"{device}: too few collectives are known well enough to tell the link between its "
            "ranks; measure them when the host is quiet"
        )
    return (
        f"{device}: {link.latency_us:.3g} us for next to nothing, then "
        f"{link.gbs * link.efficiency:.3g} GB/s a rank ({link.kind}, {link.gbs:g} on paper); "
        f"times from 1 MiB on scatter by {link.spread:.0%}; {link.source}"
    )


def _timed(device: str) -> list[KernelMeasurement]:
    """Collectives between ranks that each are such a device, of each the last good attempt."""
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
