"""Data flow between the kernels of a step, and what a compiled forward pass keeps.

AOT autograd decides what the forward pass keeps for the backward pass: a minimum cut through the
bytes of the forward pass's results, where the rest is computed again in the kernels that read it
(`min_cut_rematerialization_partition` in `torch/_functorch/partitioners.py`, PyTorch 2.4 to 2.13).
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class FusionRole(Enum):
    """Part of an operator in a fused kernel."""

    EXTERN = "extern"
    """Kernel of a library; fuses with nothing."""
    POINTWISE = "pointwise"
    WINDOW = "window"
    """Reads its input many times, so the input is written first; fuses with what follows."""
    REDUCTION = "reduction"


class Contents(NamedTuple):
    """Contents of a storage after one of its writes."""

    storage: int
    version: int


Pieces = Mapping[tuple[Contents, int], int]
"""Bytes by contents and offset in the storage."""


@dataclass(frozen=True)
class KernelNode:
    """One recorded kernel with its data flow."""

    name: str
    role: FusionRole
    backward: bool
    elements: int
    """Number of elements that its loop visits."""
    kept: int
    """Number of elements of its result."""
    reads: Pieces
    writes: Pieces


SMALL = 4
"""Number of times that a reduction's input must exceed its result for the result to be kept
(`should_ban_recomputation`)."""

_NEVER_AGAIN = ("cat", "pad", "pool", "index", "gather", "embedding", "upsample")
"""Parts of names of operators that are not among `recomputable_ops`, although inductor fuses
them."""


@dataclass(frozen=True)
class Flow:
    """Writers and readers of all contents."""

    nodes: Sequence[KernelNode]
    writer: Mapping[Contents, int]
    """Node that writes the contents."""
    readers: Mapping[Contents, Sequence[int]]
    """Nodes that read the contents, in order."""
    bytes: Mapping[Contents, int]

    @classmethod
    def of(cls, nodes: Sequence[KernelNode]) -> Flow:
        readers: dict[Contents, list[int]] = defaultdict(list)
        sizes: dict[Contents, int] = defaultdict(int)
        for i, node in enumerate(nodes):
            for contents in read_by(node):
                readers[contents].append(i)
            for (contents, _), size in node.writes.items():
                sizes[contents] += size
        writer = {contents: i for i, node in enumerate(nodes) for contents, _ in node.writes}
        return cls(nodes, writer, readers, sizes)

    def is_read_backward(self, contents: Contents, *, by_library: bool = False) -> bool:
        """Return whether the backward pass reads it, or one of its library kernels does."""
        return any(
            self.nodes[i].backward and (not by_library or self.nodes[i].role is FusionRole.EXTERN)
            for i in self.readers.get(contents, ())
        )

    def is_small(self, contents: Contents) -> bool:
        """Return whether it is a statistic, or another small result of a reduction."""
        node = self.nodes[self.writer[contents]]
        if node.role not in (FusionRole.REDUCTION, FusionRole.WINDOW):
            return False
        return SMALL * self.bytes[contents] <= max(node.reads.values(), default=0)


def read_by(node: KernelNode) -> dict[Contents, None]:
    return dict.fromkeys(contents for contents, _ in node.reads)


def written_by(node: KernelNode) -> dict[Contents, None]:
    return dict.fromkeys(contents for contents, _ in node.writes)


def kept_contents(nodes: Sequence[KernelNode]) -> Set[Contents]:
    """Return what the forward pass keeps for the backward pass, apart from parameters and inputs.

    Args:
        nodes: Kernels of a step before fusion.
    """
    import networkx as nx  # type: ignore[import-untyped]  # PyTorch cuts by it, too

    forward = [node for node in nodes if not node.backward]
    if len(forward) == len(nodes):
        return frozenset()
    flow = Flow.of(nodes)
    never_again: set[Contents] = set()
    """Contents that are not computed again."""
    for node in forward:
        never_again.update(
            contents
            for contents in written_by(node)
            if node.role is FusionRole.EXTERN
            or any(word in node.name for word in _NEVER_AGAIN)
            or flow.is_small(contents)
            or flow.is_read_backward(contents, by_library=True)
        )
    cuts = nx.DiGraph()
    cuts.add_nodes_from(("forward", "backward"))
    for node in forward:
        written = written_by(node)
        for contents in written:
            cuts.add_edge((contents, "in"), (contents, "out"), capacity=flow.bytes[contents])
            if contents not in never_again and _is_far(contents, flow, never_again):
                never_again.add(contents)
            if contents in never_again:
                cuts.add_edge("forward", (contents, "in"), capacity=math.inf)
            else:
                statistics = [c for c in written if c != contents and flow.is_small(c)]
                read = [c for c in read_by(node) if c in flow.writer and c != contents]
                for source in (*read, *statistics):
                    cuts.add_edge((source, "out"), (contents, "in"), capacity=math.inf)
            if flow.is_read_backward(contents):
                cuts.add_edge((contents, "out"), "backward", capacity=math.inf)
    _, (before, after) = nx.minimum_cut(cuts, "forward", "backward")
    return {n[0] for n in before if n[1] == "in" and (n[0], "out") in after}


def _is_far(contents: Contents, flow: Flow, never_again: Set[Contents]) -> bool:
    """Return whether a forward kernel reads it after a library's kernel that its value reaches.

    Then it is in memory anyway (`ban_recompute_used_far_apart`).
    """

    def forward_readers(contents: Contents) -> list[int]:
        return [i for i in flow.readers.get(contents, ()) if not flow.nodes[i].backward]

    users = forward_readers(contents)
    waiting, seen = list(users), set(users)
    heapq.heapify(waiting)
    while waiting and waiting[0] <= users[-1]:
        i = heapq.heappop(waiting)
        if flow.nodes[i].role is FusionRole.EXTERN:
            return any(
                user > i
                and flow.nodes[user].role is not FusionRole.EXTERN
                and not written_by(flow.nodes[user]).keys() <= never_again
                for user in users
            )
        for written in written_by(flow.nodes[i]):
            for reader in forward_readers(written):
                if reader not in seen:
                    seen.add(reader)
                    heapq.heappush(waiting, reader)
    return False


def sources(flow: Flow, kept: Set[Contents]) -> Mapping[Contents, Pieces]:
    """Return what each result of the forward pass is computed again from.

    These are results that are kept, parameters and inputs.
    """
    known: dict[Contents, Pieces] = {}
    for node in flow.nodes:
        if node.backward:
            continue
        needed: dict[tuple[Contents, int], int] = {}
        for piece, size in node.reads.items():
            is_stored = piece[0] in kept or piece[0] not in flow.writer
            _join(needed, {piece: size} if is_stored else known[piece[0]])
        known.update(dict.fromkeys(written_by(node), needed))
    return known


def traffic(
    nodes: Sequence[KernelNode], groups: Sequence[Sequence[int]], kept: Set[Contents]
) -> Iterator[tuple[int, int]]:
    """Yield the bytes that each fused kernel reads and writes.

    Args:
        nodes: Kernels of a step before fusion.
        groups: Nodes of each fused kernel.
        kept: What the forward pass keeps. The backward pass computes the rest again.
    """
    flow = Flow.of(nodes)
    group_of = {i: at for at, members in enumerate(groups) for i in members}
    again = sources(flow, kept)

    def is_written(contents: Contents) -> bool:
        """Return whether another kernel reads it."""
        writer = flow.writer[contents]
        return any(
            group_of[reader] != group_of[writer]
            and (contents in kept or nodes[reader].backward == nodes[writer].backward)
            for reader in flow.readers.get(contents, ())
        )

    for at, members in enumerate(groups):
        reads: dict[tuple[Contents, int], int] = {}
        written = 0
        for i in members:
            for piece, size in nodes[i].reads.items():
                writer = flow.writer.get(piece[0], i)
                is_again = nodes[i].backward > nodes[writer].backward and piece[0] not in kept
                if piece[0] not in flow.writer or group_of[writer] != at:
                    _join(reads, again[piece[0]] if is_again else {piece: size})
            is_result = not any(map(flow.readers.get, written_by(nodes[i])))
            written += sum(s for (c, _), s in nodes[i].writes.items() if is_result or is_written(c))
        yield sum(reads.values()), written


def _join(pieces: dict[tuple[Contents, int], int], others: Pieces) -> None:
    for piece, size in others.items():
        pieces[piece] = max(pieces.get(piece, 0), size)
