"""Links between GPUs within and between nodes, and times of collectives on them.

`link_kinds.csv` has the constants of each kind of link, fitted by `research/priors/collectives.py`,
and `nodes.csv` the links of typical nodes from their data sheets.

The time of an NCCL collective has a latency, a bandwidth, and a smooth transition between them:

    time = (latency^p + (volume / bandwidth)^p)^(1/p)

Volume is the data sent by each rank (Thakur, Rabenseifner and Gropp 2005): 2 (n - 1) / n of the
bytes in an all-reduce, half of it in an all-gather or a reduce-scatter. NCCL sends small messages
along trees, so latency grows with their depth, log2 n. It sends large messages around rings, one
per network card, and the slowest link limits each ring. Between nodes, the time within a node is
added.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cache
from math import log2
from pathlib import Path

from trappm.profiler.devices.catalogue import card_of
from trappm.profiler.errors import InputError
from trappm.profiler.records import is_cpu_device

_FOLDER = Path(__file__).parent
BITS_PER_BYTE = 8
_US = 1e-3
"""Milliseconds per microsecond."""
_GBS = 1e6
"""Bytes per millisecond at 1 GB/s."""
PCIE_GBS = {(0, 0): 15.8, (8, 0): 31.5, (9, 0): 63.0}
"""GB/s per direction of 16 PCIe lanes (3, 4 and 5) by minimum compute capability."""


class LinkKind(StrEnum):
    """Kind of link with its own set of constants."""

    NVLINK = "nvlink"
    PCIE = "pcie"
    RDMA = "rdma"
    """Network between nodes with direct access to GPU memory (InfiniBand, RoCE)."""
    TCP = "tcp"
    """Network between nodes through sockets and host memory."""
    HOST = "host"
    """Host memory between processes on CPU cores, with gloo."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """Constants of a link in the formula for collectives."""

    kind: LinkKind
    gbs: float
    """Nominal GB/s per direction, per GPU within a node and per node between nodes."""
    latency_us: float
    """Latency of an all-reduce of a tiny tensor."""
    hop_us: float
    """Additional latency when the number of ranks doubles."""
    efficiency: float
    """Share of `gbs` that large collectives reach."""
    sharpness: float
    """Exponent p of the formula: 1 adds latency and transfer time, lower values add more."""
    pair_share: float = 1.0
    """Share of the bandwidth with only two nodes, where all sockets end at the same host."""
    spread: float = 0.3
    """Standard deviation of log(measured / predicted) on held-out links."""


@dataclass(frozen=True, kw_only=True)
class NodeLinks:
    """Connections of the GPUs of a node, to each other and to other nodes."""

    name: str
    inner: Link
    network: Link
    rails: int = 1
    """Network cards per node; each GPU reaches only one of them."""
    gpus: int = 8
    most_gpus: int = 16
    """Number of GPUs in the largest node with these cards."""

    def with_network(self, gbit: float) -> NodeLinks:
        """Return the node with a network of `gbit` Gbit/s."""
        if not 0 < gbit < float("inf"):
            raise InputError(f"network speed is {gbit} Gbit/s; it must be positive and finite")
        return replace(self, network=replace(self.network, gbs=gbit / BITS_PER_BYTE))

    def slower(self, factor: float) -> NodeLinks:
        """Return the node with all collective times multiplied by `factor`."""

        def slowed(link: Link) -> Link:
            return replace(
                link,
                gbs=link.gbs / factor,
                latency_us=link.latency_us * factor,
                hop_us=link.hop_us * factor,
            )

        return replace(self, inner=slowed(self.inner), network=slowed(self.network))


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """Ranks that take part in a collective."""

    node: NodeLinks
    gpus: int
    """GPUs per node."""
    nodes: int = 1
    sharing: int = 1
    """Number of groups on the same nodes that share the network at the same time."""

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes

    @property
    def spread(self) -> float:
        """Return the standard deviation of the logarithm of these times."""
        return (self.node.network if self.nodes > 1 else self.node.inner).spread

    def all_reduce_ms(self, size_bytes: float) -> float:
        """Return the time to give every rank the sum of a tensor."""
        return self._ring(2.0, size_bytes)

    def all_gather_ms(self, size_bytes: float) -> float:
        """Return the time to give every rank a whole tensor that is sharded over the ranks."""
        return self._ring(1.0, size_bytes)

    def reduce_scatter_ms(self, size_bytes: float) -> float:
        """Return the time to give each rank its shard of the sum of a tensor."""
        is_gloo = self.node.inner.kind is LinkKind.HOST  # gloo runs an all-reduce instead
        return self._ring(2.0 if is_gloo else 1.0, size_bytes)

    def _ring(self, passes: float, size_bytes: float) -> float:
        ranks = self.ranks
        if ranks == 1 or size_bytes <= 0:
            return 0.0
        link = self.node.network if self.nodes > 1 else self.node.inner
        latency = (link.latency_us + link.hop_us * log2(ranks)) * _US * passes / 2
        moving = passes * (ranks - 1) / ranks * size_bytes / (self._gbs() * _GBS)
        power = link.sharpness
        return float((latency**power + moving**power) ** (1 / power))

    def _gbs(self) -> float:
        """Return the bandwidth of a ring in GB/s."""
        inner, network = self.node.inner, self.node.network
        within = inner.gbs * inner.efficiency
        if self.nodes == 1:
            return within
        reached = min(self.gpus * self.sharing, self.node.rails) / self.node.rails
        between = network.gbs * reached * network.efficiency / self.sharing
        if self.nodes == 2:
            between *= network.pair_share
        return between if self.gpus == 1 else 1 / (1 / between + 1 / within)


@cache
def link_kinds() -> dict[LinkKind, dict[str, float]]:
    """Return the fitted constants of each kind of link."""
    names = {field.name for field in fields(Link)} - {"kind", "gbs"}
    return {
        LinkKind(row["kind"]): {name: float(row[name]) for name in names}
        for row in _rows(_FOLDER / "link_kinds.csv")
    }


def link(kind: LinkKind, gbs: float, **known: float) -> Link:
    """Return a link of a kind and nominal speed; `known` overrides constants of the kind."""
    return Link(**{"kind": kind, "gbs": gbs, **link_kinds()[kind], **known})  # type: ignore[arg-type]


def node_of(device: str) -> NodeLinks:
    """Return the typical node of a device; PCIe and 100 Gbit/s if `nodes.csv` has no row for it.

    Raises:
        InputError: The GPU is not in the catalogue.
    """
    if is_cpu_device(device):
        host = link(LinkKind.HOST, 10.0)
        network = link(LinkKind.TCP, 100 / BITS_PER_BYTE)
        return NodeLinks(name="host", inner=host, network=network, gpus=2)
    card = card_of(device)
    if card is None:
        raise InputError(
            f"unknown device {device!r}, so its links are unknown; add a line from its data sheet "
            "to profiler/devices/catalogue.csv"
        )
    form = card.name.form or ""
    for row in _rows(_FOLDER / "nodes.csv"):
        if card.name.model == row["model"] and form.startswith(row["form"]):
            known = row["network_efficiency"]
            own = {"efficiency": float(known)} if known else {}
            return NodeLinks(
                name=row["name"],
                inner=link(LinkKind(row["inner"]), float(row["inner_gbs"])),
                network=link(
                    LinkKind(row["network"]), float(row["network_gbit"]) / BITS_PER_BYTE, **own
                ),
                rails=int(row["rails"]),
                gpus=int(row["gpus"]),
                most_gpus=int(row["most_gpus"]),
            )
    newest = max(at for at in PCIE_GBS if at <= card.capability)
    return NodeLinks(
        name="PCIe, 100 Gbit/s",
        inner=link(LinkKind.PCIE, PCIE_GBS[newest]),
        network=link(LinkKind.TCP, 100 / BITS_PER_BYTE),
    )


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open(newline="") as file:
        yield from csv.DictReader(line for line in file if not line.startswith("#"))
