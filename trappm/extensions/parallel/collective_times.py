"""How long collectives of NCCL take: latency and bandwidth, and a smooth transition between them.

    time = (latency^p + (volume / bandwidth)^p)^(1/p)

Volume is what each rank sends (Thakur, Rabenseifner and Gropp 2005): 2 (n - 1) / n of the bytes in
an all-reduce, half of it in an all-gather or a reduce-scatter. Latency
grows with the depth of a tree, log2 n, which NCCL takes for little data; large data goes around
rings, one for each network card, whose slowest link counts. Between nodes the time within each
comes on top.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from trappm.extensions.parallel.links import LinkKind, Node

_US = 1e-3
"""Milliseconds in a microsecond."""
_GBS = 1e6
"""Bytes a millisecond in a GB/s."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks that take part in a collective: so many GPUs of each of so many nodes."""

    node: Node
    gpus: int
    """Of a node."""
    nodes: int = 1
    sharing: int = 1
    """So many groups of the same GPUs' nodes are at it at once, and share the network."""

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes

    @property
    def spread(self) -> float:
        """How unsure these times are: standard deviation of their logarithm."""
        return (self.node.network if self.nodes > 1 else self.node.inner).spread

    def all_reduce_ms(self, size_bytes: float) -> float:
        """Sums a tensor of so many bytes; every rank gets the sum."""
        return self._ring(2.0, size_bytes)

    def all_gather_ms(self, size_bytes: float) -> float:
        """Every rank gets a tensor of so many bytes, of which each had its share."""
        return self._ring(1.0, size_bytes)

    def reduce_scatter_ms(self, size_bytes: float) -> float:
        """Sums a tensor of so many bytes; each rank gets its share of the sum."""
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
        """What a ring carries in GB/s."""
        inner, network = self.node.inner, self.node.network
        within = inner.gbs * inner.efficiency
        if self.nodes == 1:
            return within
        reached = min(self.gpus * self.sharing, self.node.rails) / self.node.rails
        between = network.gbs * reached * network.efficiency / self.sharing
        if self.nodes == 2:
            between *= network.pair_share
        return between if self.gpus == 1 else 1 / (1 / between + 1 / within)
