"""Kernels of a step under `torch.compile`: what inductor fuses, derived from the recorded step.

A product (convolution, matrix product, attention) remains the library's kernel. Pointwise operators
and reductions between products become one kernel, which reads its inputs and writes its outputs
once. Tensors that only its own operators read are never written. The rules follow
`torch/_inductor` of PyTorch 2.4 to 2.13: `lowering.py` (what is inlined), `scheduler.py` (what is
fused) and `graph.py` (layout of convolutions). What the backward pass computes again rather than
reads is in `data_flow.py`.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trappm.profiler.errors import BatchOrderError
from trappm.profiler.records import IntArray, Phase
from trappm.profiler.traced_step import KernelKind, KernelTable, Pass, Size
from trappm.profiler.tracing.allocation_log import AllocationLog
from trappm.profiler.tracing.data_flow import (
    Contents,
    Flow,
    FusionRole,
    KernelNode,
    kept_contents,
    read_by,
    traffic,
)
from trappm.profiler.tracing.kernel_log import (
    DESCRIPTION,
    NOT_A_PRODUCT,
    Column,
    KernelLog,
    Product,
    name_of,
)
from trappm.profiler.tracing.tensors import bytes_of, channels_last, in_backward

_EXTERN = frozenset(("sort", "topk", "nonzero", "cumsum", "cumprod", "fft_r2c", "fft_c2r"))
"""Operators without a product that inductor leaves to the library, or that are scans."""
_REDUCTIONS = (KernelKind.REDUCTION, KernelKind.SOFTMAX, KernelKind.LAYER_NORM)
_WINDOW = 25
"""Largest window of a pool that inductor computes itself (`lowering.py`)."""
_MAX_NODES = 64
"""Largest number of operators of a kernel (`max_fusion_size` in `config.py`)."""
_JOINED = 8
"""Largest number of tensors that inductor joins within another kernel (`lowering.py`)."""


def _role(
    kind: KernelKind,
    name: str,
    call: Mapping[str, Any],
    written: Tensor,
    count: int,
    read: Sequence[Tensor],
) -> FusionRole:
    if kind <= KernelKind.ATTENTION or kind is KernelKind.OTHER or count > 1 or name in _EXTERN:
        return FusionRole.EXTERN
    if name == "cat" and len(read) > _JOINED:
        return FusionRole.EXTERN
    if kind is KernelKind.REDUCTION and any(map(channels_last, read)):
        return FusionRole.WINDOW  # pixels are no inner axis of a loop over channels-last images
    if kind in _REDUCTIONS:
        return FusionRole.REDUCTION
    if kind is KernelKind.BATCH_NORM and (call.get("training") or "backward" in name):
        return FusionRole.WINDOW  # the statistics, or the sums of gradients, are a kernel before
    if kind is not KernelKind.POOLING:
        return FusionRole.POINTWISE
    if all(size == 1 for size in written.shape[2:]):
        return FusionRole.REDUCTION
    return (
        FusionRole.EXTERN if np.prod(call.get("kernel_size") or 1) > _WINDOW else FusionRole.WINDOW
    )


class FusedKernelLog(KernelLog):
    """The kernels of one compiled step at one batch size.

    Args:
        allocations: Numbers the storages of the step.
    """

    def __init__(self, allocations: AllocationLog) -> None:
        super().__init__()
        self.nodes: list[KernelNode] = []
        self._loss_begins = math.inf
        """Autograd's number of the first operator of the loss, which is not compiled."""
        self.groups: Sequence[Sequence[int]] = []
        """Nodes of each fused kernel; set by `fuse`."""
        self.kept: Set[Contents] = frozenset()
        """Results that the forward pass keeps for the backward pass; set by `fuse`."""
        self._allocations = allocations
        self._versions: dict[int, int] = defaultdict(int)
        self._operator: tuple[str, Mapping[str, Any]] = "", {}

    def begin_loss(self) -> None:
        self._loss_begins = torch._C._autograd._get_sequence_nr()

    def operator(self, func: Any, call: Mapping[str, Any], output: Any) -> None:
        self._operator = name_of(func), call
        super().operator(func, call, output)
        self._operator = "", {}

    def add(
        self,
        kind: KernelKind,
        which: Pass,
        read: Sequence[Tensor],
        written: Sequence[Tensor],
        product: Product = NOT_A_PRODUCT,
        count: int = 1,
    ) -> None:
        super().add(kind, which, read, written, product, count)
        if len(self.nodes) == len(self._rows):  # nothing is read or written
            return
        name, call = self._operator
        reads = self._pieces(read)
        for number in {self._allocations.number(tensor) for tensor in written}:
            self._versions[number] += 1
        role = (
            FusionRole.EXTERN
            if self._is_of_loss()
            else _role(kind, name, call, written[0], count, read)
        )
        kept = max(tensor.numel() for tensor in written)
        visited = (*read, *written) if role is FusionRole.REDUCTION else written
        elements = max(tensor.numel() for tensor in visited)
        backward, writes = which is not Pass.FORWARD, self._pieces(written)
        name = name or kind.name.lower()
        self.nodes.append(KernelNode(name, role, backward, elements, kept, reads, writes))

    def _is_of_loss(self) -> bool:
        """Return whether an operator outside of the model runs, or its backward pass."""
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return self._loss_begins < math.inf and not in_backward()
        # The node that adds to a parameter's gradient has a number beyond `sys.maxsize`.
        return bool(self._loss_begins <= node._sequence_nr() < sys.maxsize)

    def _pieces(self, tensors: Sequence[Tensor]) -> Mapping[tuple[Contents, int], int]:
        pieces: dict[tuple[Contents, int], int] = defaultdict(int)
        for tensor in tensors:
            number = self._allocations.number(tensor)
            contents = Contents(number, self._versions[number])
            pieces[contents, int(tensor.storage_offset())] += bytes_of([tensor])
        return pieces

    def fuse(self, like: FusedKernelLog | None = None) -> None:
        """Derive the fused kernels, or take those of the same step at another batch size.

        Raises:
            BatchOrderError: The other step has other kernels.
        """
        if like is None:
            self.groups = _Fusion(self.nodes).groups()
            self.kept = kept_contents(self.nodes)
        elif [node.name for node in like.nodes] == [node.name for node in self.nodes]:
            self.groups, self.kept = like.groups, like.kept
        else:
            raise BatchOrderError("the order of its kernels changes with the batch size")

    def node_rows(self) -> IntArray:
        """Return one row per kernel before fusion."""
        return super().rows()

    def rows(self) -> IntArray:
        """Return one row per fused kernel, with the bytes that cross its border."""
        rows = self.node_rows()
        sizes = traffic(self.nodes, self.groups, self.kept)
        fused = [
            self._row(rows, members, *of_kernel)
            for members, of_kernel in zip(self.groups, sizes, strict=True)
        ]
        return np.array(fused, dtype=np.int64).reshape(-1, rows.shape[1])

    def counts(self) -> IntArray:
        counts = super().counts()
        return np.array([counts[members[0]] for members in self.groups], dtype=np.int64)

    def _row(self, rows: IntArray, members: Sequence[int], read: int, written: int) -> IntArray:
        """Return the row of a kernel; its class and shape are those of one of its nodes."""

        def weight(i: int) -> tuple[bool, int]:
            return self.nodes[i].role is FusionRole.REDUCTION, self.nodes[i].elements

        first = max(members, key=weight)
        row: IntArray = rows[first].copy()
        if self.nodes[first].role is FusionRole.EXTERN:
            return row
        if self.nodes[first].role is not FusionRole.REDUCTION:
            row[Column.KIND] = _pointwise_kind(rows[members, Column.KIND].tolist())
        shared = [Column.HALF, Column.CHANNELS_LAST]
        row[shared] = rows[members][:, shared].max(axis=0)
        row[DESCRIPTION + Size.READ_BYTES : DESCRIPTION + Size.WRITTEN_BYTES + 1] = read, written
        return row


def _pointwise_kind(kinds: Sequence[int]) -> KernelKind:
    """Return the class of a kernel of pointwise nodes: that of the slowest access to memory."""
    for slow in (KernelKind.INDEX, KernelKind.POOLING, KernelKind.STRIDED):
        if slow in kinds:
            return slow
    return KernelKind.STRIDED if KernelKind.COPY in kinds else KernelKind.ELEMENTWISE


@dataclass(eq=False)
class _FusedNodes:
    """Nodes of one kernel. Sets of nodes are bits of integers."""

    nodes: int
    before: int
    """All nodes that run before the group."""
    elements: int
    """Number of elements that its loop visits."""
    kept: set[int]
    """Numbers of elements of its reductions' results."""
    backward: bool
    fuses: bool


class _Fusion:
    """Greedy fusion of nodes in the order in which they were recorded."""

    def __init__(self, nodes: Sequence[KernelNode]) -> None:
        self._nodes = nodes
        self._group_of: list[_FusedNodes] = []
        self._groups: set[_FusedNodes] = set()
        self._flow = Flow.of(nodes)

    def groups(self) -> list[list[int]]:
        """Return the nodes of each kernel of a compiled step, ordered by their first node."""
        for i, node in enumerate(self._nodes):
            self._append(i, node)
            if node.role is FusionRole.EXTERN:
                continue
            read = read_by(node)
            if node.role is not FusionRole.WINDOW:
                for contents in read:
                    self._try(i, self._flow.writer.get(contents, i), produces=True)
                for contents in read:
                    for reader in self._flow.readers[contents]:
                        if reader < i:
                            self._try(i, reader, produces=False)
        members: dict[_FusedNodes, list[int]] = defaultdict(list)
        for i, group in enumerate(self._group_of):
            members[group].append(i)
        return list(members.values())

    def _append(self, i: int, node: KernelNode) -> None:
        before = 0
        for contents, _ in node.reads:
            writer = self._flow.writer.get(contents, i)
            if writer < i:
                group = self._group_of[writer]
                before |= group.nodes | group.before
        kept = {node.kept} if node.role is FusionRole.REDUCTION else set[int]()
        fuses = node.role is not FusionRole.EXTERN
        group = _FusedNodes(1 << i, before, node.elements, kept, node.backward, fuses)
        self._group_of.append(group)
        self._groups.add(group)

    def _try(self, i: int, other: int, *, produces: bool) -> None:
        """Fuse the group of node i with that of an earlier node, if inductor would."""
        if other >= i:
            return
        later, earlier = self._group_of[i], self._group_of[other]
        if later is earlier or not earlier.fuses or later.backward != earlier.backward:
            return
        node = self._nodes[i]
        inlined = produces and not earlier.kept and self._only_for(earlier, later)
        if node.role is FusionRole.REDUCTION and earlier.kept - {earlier.elements}:
            matches = earlier.elements == node.elements and node.kept in earlier.kept
        else:
            matches = node.elements in {earlier.elements, *(earlier.kept if produces else ())}
        is_small = (earlier.nodes | later.nodes).bit_count() <= _MAX_NODES
        if (matches or inlined) and is_small and not self._is_between(earlier, later):
            self._merge(earlier, later, node.elements if inlined else earlier.elements)

    def _only_for(self, earlier: _FusedNodes, later: _FusedNodes) -> bool:
        """Return whether nothing else reads the results of a group."""
        both = earlier.nodes | later.nodes
        return all(
            both >> reader & 1
            for i in _bits(earlier.nodes)
            for contents, _ in self._nodes[i].writes
            for reader in self._flow.readers.get(contents, ())
        )

    def _is_between(self, earlier: _FusedNodes, later: _FusedNodes) -> bool:
        """Return whether a path from one group to the other leads over a third."""
        both = earlier.nodes | later.nodes
        between = (earlier.before | later.before) & ~both
        return any(self._group_of[i].before & both for i in _bits(between))

    def _merge(self, one: _FusedNodes, other: _FusedNodes, elements: int) -> None:
        nodes = one.nodes | other.nodes
        before = (one.before | other.before) & ~nodes
        merged = _FusedNodes(nodes, before, elements, one.kept | other.kept, one.backward, True)
        self._groups -= {one, other}
        for group in self._groups:
            if group.before & nodes:
                group.before |= nodes | before
        self._groups.add(merged)
        for i in _bits(nodes):
            self._group_of[i] = merged


def _bits(nodes: int) -> Iterator[int]:
    while nodes:
        lowest = nodes & -nodes
        yield lowest.bit_length() - 1
        nodes ^= lowest


FEW_CONVOLUTIONS = 300
"""Number of operators per convolution from which inductor keeps the layout (`graph.py`)."""


def prefers_channels_last(table: KernelTable, phase: Phase) -> bool:
    """Return whether inductor runs the convolutions of a step in channels-last on a GPU.

    `decide_layout_opt` in `torch/_inductor/graph.py` weights the operations of four classes.
    """
    forward = (table.kinds <= KernelKind.DEPTHWISE) & (table.passes == Pass.FORWARD)
    number = int(table.counts[forward].sum())
    if not number or int(table.counts.sum()) >= FEW_CONVOLUTIONS * number:
        return False
    sizes = table.sizes_at(1)[forward]
    windows, kinds = table.windows[forward], table.kinds[forward]
    outputs = sizes[:, Size.COLUMNS] * sizes[:, Size.PRODUCTS]
    inputs = sizes[:, Size.DEPTH] / windows
    grouped = kinds == KernelKind.GROUPED
    small = (outputs <= 64) & (inputs <= 64)
    narrowing = (outputs * 2 <= inputs) & (windows > 1)
    if phase is Phase.TRAIN:
        return not (grouped.any() or narrowing.any() or small.all())
    factor = np.select([grouped, small, narrowing], [1.358, 0.783, 0.725], 0.823)
    operations = sizes[:, Size.FLOPS] * table.counts[forward]
    return bool((factor * operations).sum() <= operations.sum())
