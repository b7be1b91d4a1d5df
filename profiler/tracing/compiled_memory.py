"""Allocations of a step under `torch.compile`, derived from its fused kernels.

A kernel allocates the results that other kernels read, and frees what no later kernel reads. AOT
autograd decides what the forward pass keeps for the backward pass: a minimum cut through the bytes
of the forward pass's results, where the rest is computed again in the kernels that read it
(`min_cut_rematerialization_partition` in `torch/_functorch/partitioners.py`, PyTorch 2.4 to 2.13).
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from trappm.profiler.records import IntArray
from trappm.profiler.simulation.kernel_profile import KernelKind, Size
from trappm.profiler.simulation.step_trace import Event, Pass
from trappm.profiler.tracing.fusion import Contents, FusedKernelLog, Node, Role
from trappm.profiler.tracing.kernel_log import DESCRIPTION

SMALL = 4
"""Number of times that a reduction's input must exceed its result for the result to be kept
(`should_ban_recomputation`)."""

_NEVER_AGAIN = ("cat", "pad", "pool", "index", "gather", "embedding", "upsample")
"""Parts of names of operators that are not among `recomputable_ops`, although inductor fuses
them."""


@dataclass(frozen=True)
class _Flow:
    """Writers and readers of all contents."""

    nodes: Sequence[Node]
    writer: Mapping[Contents, int]
    """Node that writes the contents."""
    readers: Mapping[Contents, Sequence[int]]
    """Nodes that read the contents, in order."""
    bytes: Mapping[Contents, int]

    @classmethod
    def of(cls, nodes: Sequence[Node]) -> _Flow:
        readers: dict[Contents, list[int]] = defaultdict(list)
        sizes: dict[Contents, int] = defaultdict(int)
        for i, node in enumerate(nodes):
            for contents in _read_by(node):
                readers[contents].append(i)
            for (contents, _), size in node.writes.items():
                sizes[contents] += size
        writer = {contents: i for i, node in enumerate(nodes) for contents, _ in node.writes}
        return cls(nodes, writer, readers, sizes)

    def is_read_backward(self, contents: Contents, *, by_library: bool = False) -> bool:
        """Return whether the backward pass reads it, or one of its library kernels does."""
        return any(
            self.nodes[i].backward and (not by_library or self.nodes[i].role is Role.EXTERN)
            for i in self.readers.get(contents, ())
        )

    def is_small(self, contents: Contents) -> bool:
        """Return whether it is a statistic, or another small result of a reduction."""
        node = self.nodes[self.writer[contents]]
        if node.role not in (Role.REDUCTION, Role.WINDOW):
            return False
        return SMALL * self.bytes[contents] <= max(node.reads.values(), default=0)


def _read_by(node: Node) -> dict[Contents, None]:
    return dict.fromkeys(contents for contents, _ in node.reads)


def _written_by(node: Node) -> dict[Contents, None]:
    return dict.fromkeys(contents for contents, _ in node.writes)


def kept_contents(nodes: Sequence[Node]) -> Set[Contents]:
    """Return what the forward pass keeps for the backward pass, apart from parameters and inputs.

    Args:
        nodes: Kernels of a training step before fusion.
    """
    import networkx as nx  # type: ignore[import-untyped]  # PyTorch cuts by it, too

    flow = _Flow.of(nodes)
    never_again: set[Contents] = set()
    """Contents that are not computed again."""
    forward = [node for node in nodes if not node.backward]
    for node in forward:
        never_again.update(
            contents
            for contents in _written_by(node)
            if node.role is Role.EXTERN
            or any(word in node.name for word in _NEVER_AGAIN)
            or flow.is_small(contents)
            or flow.is_read_backward(contents, by_library=True)
        )
    cuts = nx.DiGraph()
    cuts.add_nodes_from(("forward", "backward"))
    for node in forward:
        written = _written_by(node)
        for contents in written:
            cuts.add_edge((contents, "in"), (contents, "out"), capacity=flow.bytes[contents])
            if contents not in never_again and _is_far(contents, flow, never_again):
                never_again.add(contents)
            if contents in never_again:
                cuts.add_edge("forward", (contents, "in"), capacity=math.inf)
            else:
                statistics = [c for c in written if c != contents and flow.is_small(c)]
                sources = [c for c in _read_by(node) if c in flow.writer and c != contents]
                for source in (*sources, *statistics):
                    cuts.add_edge((source, "out"), (contents, "in"), capacity=math.inf)
            if flow.is_read_backward(contents):
                cuts.add_edge((contents, "out"), "backward", capacity=math.inf)
    _, (before, after) = nx.minimum_cut(cuts, "forward", "backward")
    return {n[0] for n in before if n[1] == "in" and (n[0], "out") in after}


def _is_far(contents: Contents, flow: _Flow, never_again: Set[Contents]) -> bool:
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
        if flow.nodes[i].role is Role.EXTERN:
            return any(
                user > i
                and flow.nodes[user].role is not Role.EXTERN
                and not _written_by(flow.nodes[user]).keys() <= never_again
                for user in users
            )
        for written in _written_by(flow.nodes[i]):
            for reader in forward_readers(written):
                if reader not in seen:
                    seen.add(reader)
                    heapq.heappush(waiting, reader)
    return False


_COPY = -1
"""Version of contents that inductor copies into another layout."""


class CompiledMemory:
    """Allocations of one step in order, the same at every batch size.

    The model is compiled, and its loss is not.

    Args:
        log: Fused kernels of the step.
        gradients: Storages of the parameters' gradients.
        inputs: Number of storages of the inputs, which come first.
        outputs: Storages of the model's output, which live until the forward pass ends.
        copied: Storages of weights and images that inductor copies into another layout.
    """

    def __init__(
        self,
        log: FusedKernelLog,
        *,
        gradients: Set[int],
        inputs: int,
        outputs: Set[int],
        copied: Set[int],
    ) -> None:
        self._flow = _Flow.of(log.nodes)
        self._groups, self._inputs, self._copied = log.groups, inputs, copied
        self._kinds = log.node_rows()[:, :2]
        self._gradients, self._outputs = (
            self._latest(storages) for storages in (gradients, outputs)
        )
        trains = any(node.backward for node in log.nodes)
        self._kept = kept_contents(log.nodes) if trains else frozenset[Contents]()
        self._sources = self._kept_sources()
        self.events = list(self._events())

    def _latest(self, storages: Set[int]) -> Set[Contents]:
        """Return the contents of these storages after their last writes."""
        latest = {c.storage: c for c in self._flow.writer if c.storage in storages}
        return frozenset(latest.values())

    def arrays(
        self, logs: Sequence[FusedKernelLog]
    ) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Return kinds (E), blocks (E), sizes (E, logs) and the gradients' blocks of the events.

        Args:
            logs: The step at each batch size.
        """
        numbers: dict[Contents, int] = {}
        blocks, sizes = [], []
        of_contents = [_bytes(log.nodes) for log in logs]
        touched = [log.node_rows()[:, _READ_AND_WRITTEN].sum(axis=1) for log in logs]
        for event, what in self.events:
            if isinstance(what, Contents):
                blocks.append(numbers.setdefault(what, len(numbers)))
                sizes.append([known[what] for known in of_contents])
            else:
                convolution = event is Event.WORKSPACE
                blocks.append(int(self._kinds[what] @ (len(Pass), 1)) if convolution else 0)
                sizes.append([int(known[what]) if convolution else 0 for known in touched])
        gradients = sorted(numbers[contents] for contents in self._gradients)
        kinds = [event for event, _ in self.events]
        return np.array(kinds), np.array(blocks), np.array(sizes), np.array(gradients)

    def _events(self) -> Iterator[tuple[Event, Contents | int]]:
        """Yield each event with its tensor, or the node that needs scratch memory."""
        flow, order = self._flow, self._order()
        reads = [self._reads(at) for at in order]
        last = {contents: step for step, read in enumerate(reads) for contents in read}
        alive: set[Contents] = set()
        ended = False
        for contents in flow.readers:
            if self._is_input(contents):
                yield Event.ALLOCATE, contents
        for step, at in enumerate(order):
            members = [flow.nodes[i] for i in self._groups[at]]
            if members[0].backward and not ended:
                ended = True
                yield from self._end_forward(alive, {c for c in last if last[c] >= step})
            stays = self._gradients if ended else self._gradients | self._outputs
            results = [c for node in members for c in _written_by(node)]
            results = [c for c in results if c in last or c in stays]
            unwritten = [c for c in reads[step] if c not in flow.writer and c not in alive]
            dead = [c for c in reads[step] if last[c] == step and c not in stays]
            if members[0].role is not Role.EXTERN:  # it may write over what it has read
                for contents in self._overwritten(dead, results):
                    dead.remove(contents)
                    alive.remove(contents)
                    yield Event.FREE, contents
            for contents in (*unwritten, *results):
                alive.add(contents)
                yield Event.ALLOCATE, contents
            for i in self._groups[at]:
                if self._is_convolution(i):
                    yield Event.WORKSPACE, i
            for contents in dead:
                alive.remove(contents)
                yield Event.FREE, contents
        if not ended:
            yield from self._end_forward(alive, frozenset())
        for contents in self._gradients:
            yield Event.ACCUMULATE, contents

    def _end_forward(
        self, alive: set[Contents], read_later: Set[Contents]
    ) -> Iterator[tuple[Event, Contents | int]]:
        """Yield the end of the forward pass, and free outputs that the backward pass skips."""
        yield Event.END_OF_FORWARD, 0
        for contents in self._outputs & alive - read_later - self._gradients:
            alive.remove(contents)
            yield Event.FREE, contents

    def _order(self) -> list[int]:
        """Return the fused kernels in an order in which they can run, as early as recorded."""
        flow, group_of = self._flow, dict[int, int]()
        for at, members in enumerate(self._groups):
            group_of.update(dict.fromkeys(members, at))
        followers: dict[int, set[int]] = defaultdict(set)
        missing = [0] * len(self._groups)
        for at, members in enumerate(self._groups):
            read = {c for i in members for c in _read_by(flow.nodes[i]) if c in flow.writer}
            before = {group_of[flow.writer[contents]] for contents in read} - {at}
            missing[at] = len(before)
            for other in before:
                followers[other].add(at)
        order = []
        ready = [(members[0], at) for at, members in enumerate(self._groups) if not missing[at]]
        heapq.heapify(ready)
        while ready:
            _, at = heapq.heappop(ready)
            order.append(at)
            for follower in followers[at]:
                missing[follower] -= 1
                if not missing[follower]:
                    heapq.heappush(ready, (self._groups[follower][0], follower))
        return order

    def _reads(self, at: int) -> Set[Contents]:
        """Return what a fused kernel reads from memory, apart from parameters and inputs."""
        flow, members = self._flow, set(self._groups[at])
        result: set[Contents] = set()
        for i in members:
            for contents in _read_by(flow.nodes[i]):
                writer = flow.writer.get(contents)
                if writer is None:
                    if contents.storage in self._copied and self._is_convolution(i):
                        result.add(Contents(contents.storage, _COPY))
                    elif contents.storage >= self._inputs:
                        result.add(contents)
                elif flow.nodes[i].backward and not flow.nodes[writer].backward:
                    result.update(self._sources[contents])
                elif writer not in members:
                    result.add(contents)
        return result

    def _kept_sources(self) -> Mapping[Contents, Set[Contents]]:
        """Return the kept contents that each result of the forward pass is computed again from."""
        sources: dict[Contents, Set[Contents]] = {}
        for node in self._flow.nodes:
            if node.backward:
                continue
            written = _written_by(node)
            kept = {contents for contents in written if contents in self._kept}
            again = kept.union(*(sources.get(contents, ()) for contents in _read_by(node)))
            sources |= {c: {c} if c in kept else again for c in written}
        return sources

    def _overwritten(
        self, dead: Sequence[Contents], results: Sequence[Contents]
    ) -> Sequence[Contents]:
        """Return the inputs of a kernel whose memory its results of the same size take."""
        sizes = [self._flow.bytes[contents] for contents in results]
        taken = []
        for contents in dead:
            size = self._flow.bytes.get(contents)
            if size in sizes:
                sizes.remove(size)
                taken.append(contents)
        return taken

    def _is_input(self, contents: Contents) -> bool:
        return 0 <= contents.storage < self._inputs and contents.version == 0

    def _is_convolution(self, i: int) -> bool:
        return bool(self._kinds[i, 0] <= KernelKind.DEPTHWISE)


_READ_AND_WRITTEN = slice(DESCRIPTION + Size.READ_BYTES, DESCRIPTION + Size.WRITTEN_BYTES + 1)


def _bytes(nodes: Sequence[Node]) -> Mapping[Contents, int]:
    """Return the bytes of all contents, of inputs and of copies."""
    known = dict(_Flow.of(nodes).bytes)
    for node in nodes:
        for (contents, _), size in node.reads.items():
            if contents not in known or contents.version <= 0:
                for version in (contents.version, _COPY):
                    key = Contents(contents.storage, version)
                    known[key] = max(known.get(key, 0), size)
    return known
