"""Allocations of a step under `torch.compile`, derived from its fused kernels.

A kernel allocates the results that other kernels read, and frees what no later kernel reads. What
the forward pass keeps for the backward pass is in `data_flow.py`.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set

import numpy as np

from trappm.profiler.records import IntArray
from trappm.profiler.simulation.kernel_profile import KernelKind, Size
from trappm.profiler.simulation.step_trace import Event, Pass
from trappm.profiler.tracing.data_flow import (
    Contents,
    Flow,
    Node,
    Role,
    read_by,
    sources,
    written_by,
)
from trappm.profiler.tracing.fusion import FusedKernelLog
from trappm.profiler.tracing.kernel_log import DESCRIPTION

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
        self._flow = Flow.of(log.nodes)
        self._groups, self._inputs, self._copied = log.groups, inputs, copied
        self._kinds = log.node_rows()[:, :2]
        self._gradients, self._outputs = (
            self._latest(storages) for storages in (gradients, outputs)
        )
        self._kept = log.kept
        self._again = sources(self._flow, log.kept)
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
            results = [c for node in members for c in written_by(node)]
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
            read = {c for i in members for c in read_by(flow.nodes[i]) if c in flow.writer}
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
            for contents in read_by(flow.nodes[i]):
                writer = flow.writer.get(contents)
                if writer is None:
                    if contents.storage in self._copied and self._is_convolution(i):
                        result.add(Contents(contents.storage, _COPY))
                    elif contents.storage >= self._inputs:
                        result.add(contents)
                elif flow.nodes[i].backward and not flow.nodes[writer].backward:
                    again = {c for c, _ in self._again[contents]} & self._kept
                    result |= {contents} if contents in self._kept else again
                elif writer not in members:
                    result.add(contents)
        return result

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
    known = dict(Flow.of(nodes).bytes)
    for node in nodes:
        for (contents, _), size in node.reads.items():
            if contents not in known or contents.version <= 0:
                for version in (contents.version, _COPY):
                    key = Contents(contents.storage, version)
                    known[key] = max(known.get(key, 0), size)
    return known
