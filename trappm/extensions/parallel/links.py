"""Links between GPUs, within a node and between nodes, and how long collectives take on them.

`link_kinds.csv` has the constants of each kind of link, fitted by `research/priors/collectives.py`,
and `nodes.csv` the links of usual nodes by their data sheets.

A collective of NCCL has a latency, a bandwidth, and a smooth transition between them:

    time = (latency^p + (volume / bandwidth)^p)^(1/p)

Volume is what each rank sends (Thakur, Rabenseifner and Gropp 2005): 2 (n - 1) / n of the bytes in
an all-reduce, half of it in an all-gather or a reduce-scatter. Latency grows with the depth of a
tree, log2 n, which NCCL takes for little data; large data goes around rings, one for each network
card, whose slowest link counts. Between nodes the time within each comes on top.
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
"""Bytes per millisecond in a GB/s."""
PCIE_GBS = {(0, 0): 15.8, (8, 0): 31.5, (9, 0): 63.0}
"""A direction of 16 lanes, from this compute capability on: PCIe 3, 4 and 5."""


class LinkKind(StrEnum):
    """Kinds of links that software uses in the same way."""

    NVLINK = "nvlink"
    PCIE = "pcie"
    RDMA = "rdma"
    """Between nodes, the network card reads the GPU's memory (InfiniBand, RoCE)."""
    TCP = "tcp"
    """Between nodes, through sockets and the host's memory."""
    HOST = "host"
    """Processes on CPU cores, by gloo."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """Constants of a link in the formula of collectives."""

    kind: LinkKind
    gbs: float
    """GB/s in a direction: of a GPU, and of a node where it leads to other nodes, on paper."""
    latency_us: float
    """Of an all-reduce of next to nothing."""
    hop_us: float
    """Latency added by doubling the number of ranks."""
    efficiency: float
    """Share of `gbs` that large collectives reach."""
    sharpness: float
    """How suddenly latency gives way to bandwidth: 1 is their sum, below 1 a longer transition."""
    pair_share: float = 1.0
    """Of the bandwidth, where there are two nodes only: all sockets end at the same host."""
    spread: float = 0.3
    """Standard deviation of the logarithm of times against it, where the link was held out."""
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Node:
    """How the GPUs of a node are connected, to each other and to other nodes."""

    name: str
    inner: Link
    network: Link
    rails: int = 1
    """Network cards of a node: fewer GPUs of it reach as many of them only."""
    gpus: int = 8
    most_gpus: int = 16
    """Of the largest node of such cards."""

    def with_network(self, gbit: float) -> Node:
        """The same with so many Gbit/s between nodes."""
        if not 0 < gbit < float("inf"):
            raise InputError(f"a network of {gbit} Gbit/s; give the speed of a node's network")
        return replace(self, network=replace(self.network, gbs=gbit / BITS_PER_BYTE))

    def slower(self, factor: float) -> Node:
        """The same where each collective takes so many times as long."""

        def slowed(link: Link) -> Link:
            return replace(
                link,
                gbs=link.gbs / factor,
                latency_us=link.latency_us * factor,
                hop_us=link.hop_us * factor,
            )

        return replace(self, inner=slowed(self.inner), network=slowed(self.network))


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks that take part in a collective."""

    node: Node
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
        """Return the time in which every rank gets the sum of a tensor."""
        return self._ring(2.0, size_bytes)

    def all_gather_ms(self, size_bytes: float) -> float:
        """Return the time in which every rank gets a tensor, of which each had its share."""
        return self._ring(1.0, size_bytes)

    def reduce_scatter_ms(self, size_bytes: float) -> float:
        """Return the time in which each rank gets its share of the sum of a tensor."""
        is_gloo = self.node.inner.kind is LinkKind.HOST  # which sums all of it on every rank
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
    """How software uses links of each kind."""
    names = {field.name for field in fields(Link)} - {"kind", "gbs", "source"}
    return {
        LinkKind(row["kind"]): {name: float(row[name]) for name in names}
        for row in _rows(_FOLDER / "link_kinds.csv")
    }


def link(kind: LinkKind, gbs: float, **known: float | str) -> Link:
    """A link of this kind and speed; `known` is what is known of this one itself."""
    return Link(**{"kind": kind, "gbs": gbs, **link_kinds()[kind], **known})  # type: ignore[arg-type]


def node_of(device: str) -> Node:
    """The usual node of a device's cards; of one that no row names, PCIe and 100 Gbit/s.

    Raises:
        InputError: nobody has listed the card.
    """
    if is_cpu_device(device):
        host = link(LinkKind.HOST, 10.0, source="two processes of one host, by gloo")
        network = link(LinkKind.TCP, 100 / BITS_PER_BYTE)
        return Node(name="host", inner=host, network=network, gpus=2)
    card = card_of(device)
    if card is None:
        raise InputError(
            f"nothing is known of device {device!r}, so neither are its links; add a line of its "
            "data sheet to profiler/devices/catalogue.csv"
        )
    form = card.name.form or ""
    for row in _rows(_FOLDER / "nodes.csv"):
        if card.name.model == row["model"] and form.startswith(row["form"]):
            known = row["network_efficiency"]
            own = {"efficiency": float(known)} if known else {}
            return Node(
                name=row["name"],
                inner=link(LinkKind(row["inner"]), float(row["inner_gbs"]), source=row["source"]),
                network=link(
                    LinkKind(row["network"]), float(row["network_gbit"]) / BITS_PER_BYTE, **own
                ),
                rails=int(row["rails"]),
                gpus=int(row["gpus"]),
                most_gpus=int(row["most_gpus"]),
            )
    newest = max(at for at in PCIE_GBS if at <= card.capability)
    return Node(
        name="PCIe, 100 Gbit/s",
        inner=link(LinkKind.PCIE, PCIE_GBS[newest]),
        network=link(LinkKind.TCP, 100 / BITS_PER_BYTE),
    )


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open(newline="") as file:
        yield from csv.DictReader(line for line in file if not line.startswith("#"))
