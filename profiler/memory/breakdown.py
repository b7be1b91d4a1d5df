"""Composition of a step's memory at its peak: kinds of tensors, modules, the largest tensors.

A trace has the lifetime of each block, and the recorder notes its origin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

import numpy as np
import numpy.typing as npt

from trappm.profiler.memory.simulation import MIB, SimulatedMemory
from trappm.profiler.records import IntArray
from trappm.profiler.traced_step import Allocations, Event, Origin

LARGEST = 10
"""Number of largest tensors to name."""


class Part(StrEnum):
    """Purpose of memory."""

    PARAMETERS = "parameters"
    """Parameters and buffers."""
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    OPTIMIZER_STEP = "optimizer step"
    """Temporary tensors of the optimizer's step."""
    INPUTS = "inputs"
    ACTIVATIONS = "activations"
    """Results of the forward pass, most of them for the backward pass."""
    LOGITS = "logits"
    """Scores of a loss over classes or a vocabulary, their softmax, and gradients of both."""
    BACKWARD = "backward pass"
    """Gradients of activations, and other temporary tensors of the backward pass."""
    WORKSPACES = "workspaces"
    """Scratch memory of convolutions and matrix products."""
    FRAGMENTS = "fragments"
    """Memory of PyTorch's allocator that is unusable at the peak."""
    CONTEXT = "CUDA context"


@dataclass(frozen=True, kw_only=True)
class LargeTensor:
    """A tensor that is alive at the peak."""

    size_mib: float
    part: Part
    origin: Origin


@dataclass
class ModuleMemory:
    """Tensors of a module and its children at the peak, in MiB."""

    name: str
    """Path within the model."""
    size_mib: float = 0.0
    children: dict[str, ModuleMemory] = field(default_factory=dict)

    def __repr__(self) -> str:
        children = len(self.children)
        return f"<ModuleMemory: {self.name} {self.size_mib:,.1f} MiB, {children} children>"

    def add(self, path: str, size_mib: float) -> None:
        """Count a tensor for the module of this path and all modules above."""
        node = self
        node.size_mib += size_mib
        for step in filter(None, path.split(".")):
            full = f"{node.name}.{step}" if node.name else step
            node = node.children.setdefault(step, ModuleMemory(full))
            node.size_mib += size_mib

    def walk(self, depth: int) -> Iterator[ModuleMemory]:
        """Yield all modules down to this depth, in the model's order."""
        for child in self.children.values():
            yield child
            if depth > 1:
                yield from child.walk(depth - 1)


@dataclass(frozen=True, kw_only=True)
class MemoryBreakdown:
    """Composition of a step's memory at its peak."""

    parts_mib: Mapping[Part, float]
    modules: ModuleMemory
    """Activations and gradients of activations."""
    largest: Sequence[LargeTensor]
    moment: str
    """Moment of the peak: `the backward pass, in layer4.2 (timm/models/resnet.py:233)`."""

    @property
    def total_mib(self) -> float:
        return sum(self.parts_mib.values())

    def __repr__(self) -> str:
        parts = ", ".join(f"{part} {size_mib:,.0f}" for part, size_mib in self.parts_mib.items())
        return f"<MemoryBreakdown: {self.total_mib:,.0f} MiB in {self.moment}: {parts}>"


def break_down(
    allocations: Allocations,
    origins: Sequence[Origin],
    batch_size: int,
    memory: SimulatedMemory,
    state_bytes: int,
    *,
    fixed_mib: Mapping[Part, float],
    kept_gradients: Sequence[int] = (),
) -> MemoryBreakdown:
    """Return the composition of the simulated memory of a step.

    Args:
        allocations, origins, batch_size: Allocations, origin of each block, any batch size.
        memory: Result of `simulate_memory` for the same step.
        state_bytes: Optimizer states.
        fixed_mib: Parts outside of the allocations: the context, workspaces of libraries.
        kept_gradients: Indices of the parameters whose gradients of an earlier pass exist
            throughout the step.
    """
    peak = _PeakMoment.of(allocations, batch_size)
    weights = int(allocations.parameter_bytes.sum() + allocations.buffer_bytes.sum())
    kept_bytes = int(allocations.parameter_bytes[list(kept_gradients)].sum())
    is_of_logits = _of_logits(origins, peak.block_sizes)
    alive, optimizer_mib = peak.alive, 0.0
    moment = _moment(allocations, origins, peak.event, is_of_logits)
    is_gradient = np.isin(np.arange(len(alive)), allocations.gradients)
    kept = allocations.gradients[list(kept_gradients)]
    alive = alive & ~np.isin(np.arange(len(alive)), kept)
    # Rounding each block up to 512 bytes makes less than this.
    if memory.live_mib > (weights + kept_bytes + state_bytes + peak.live_bytes) / MIB * 1.02 + 1:
        alive = is_gradient & ~np.isin(np.arange(len(alive)), kept)
        gradient_bytes = kept_bytes + int(peak.block_sizes[alive].sum())
        optimizer_mib = memory.live_mib - (weights + state_bytes + gradient_bytes) / MIB
        moment = "the optimizer's step"
    tensors = [
        LargeTensor(
            size_mib=float(peak.block_sizes[number]) / MIB,
            part=_part(origins[number], bool(is_gradient[number]), bool(is_of_logits[number])),
            origin=origins[number],
        )
        for number in np.flatnonzero(alive).tolist()
    ]
    parts = dict.fromkeys(Part, 0.0)
    modules = ModuleMemory("")
    for tensor in tensors:
        parts[tensor.part] += tensor.size_mib
        if tensor.part in (Part.ACTIVATIONS, Part.LOGITS, Part.BACKWARD):
            modules.add(tensor.origin.module, tensor.size_mib)
    parts[Part.GRADIENTS] += kept_bytes / MIB
    parts[Part.PARAMETERS] = weights / MIB
    parts[Part.OPTIMIZER] = state_bytes / MIB
    parts[Part.OPTIMIZER_STEP] = optimizer_mib
    parts[Part.WORKSPACES] = max(memory.reserved_with_workspace_mib - memory.reserved_mib, 0.0)
    used_mib = sum(parts.values())
    parts[Part.FRAGMENTS] = max(memory.reserved_with_workspace_mib - used_mib, 0.0)
    for part, size_mib in fixed_mib.items():
        parts[part] += size_mib
    return MemoryBreakdown(
        parts_mib={part: size_mib for part, size_mib in parts.items() if size_mib > 0},
        modules=modules,
        largest=sorted(tensors, key=lambda t: -t.size_mib)[:LARGEST],
        moment=moment,
    )


@dataclass(frozen=True)
class _PeakMoment:
    """The moment of a trace at which most bytes are alive."""

    event: int
    alive: npt.NDArray[np.bool_]
    """True for the blocks that are alive."""
    block_sizes: IntArray
    live_bytes: int

    @classmethod
    def of(cls, allocations: Allocations, batch_size: int) -> Self:
        sizes = allocations.sizes_at(batch_size)
        born, died = (allocations.kinds == event for event in (Event.ALLOCATE, Event.FREE))
        block_sizes = sizes[born]
        change = np.where(born, sizes, 0)
        change[died] = -block_sizes[allocations.blocks[died]]
        live = np.append(np.cumsum(change), 0)
        event = int(live.argmax())
        alive = np.zeros(len(block_sizes), dtype=np.bool_)
        alive[allocations.blocks[: event + 1][born[: event + 1]]] = True
        alive[allocations.blocks[: event + 1][died[: event + 1]]] = False
        return cls(event, alive, block_sizes, int(live[event]))


def _of_logits(origins: Sequence[Origin], sizes: IntArray) -> npt.NDArray[np.bool_]:
    """Return which blocks are scores of a loss, their softmax or gradients.

    A loss over classes computes a log-softmax. Blocks with as many elements, in 32 bits or 16, made
    by the loss or by the module of the scores, belong to it.
    """
    are_logits = np.zeros(len(origins), dtype=np.bool_)
    for place, origin in enumerate(origins):
        if origin.operator != "_log_softmax" or origin.is_backward:
            continue
        alike = np.isin(sizes, (sizes[place], sizes[place] // 2)).tolist()
        first = place
        while first and alike[first - 1]:  # casts and copies of the scores
            first -= 1
        modules = {"", *(origin.module for origin in origins[first : place + 1])}
        are_logits |= [same and o.module in modules for same, o in zip(alike, origins, strict=True)]
    return are_logits


def _part(origin: Origin, is_gradient: bool, is_of_logits: bool) -> Part:
    if is_gradient:
        return Part.GRADIENTS
    if is_of_logits:
        return Part.LOGITS
    if not origin.operator:
        return Part.INPUTS
    return Part.BACKWARD if origin.is_backward else Part.ACTIVATIONS


def _moment(
    allocations: Allocations,
    origins: Sequence[Origin],
    peak: int,
    is_of_logits: npt.NDArray[np.bool_],
) -> str:
    if not origins:
        return "the start"
    number = int(
        allocations.blocks[: peak + 1][allocations.kinds[: peak + 1] == Event.ALLOCATE][-1]
    )
    last = origins[number]
    which = "backward pass" if last.is_backward else "forward pass"
    if is_of_logits[number]:
        which += " of the loss"
    where = f", in {last.module}" if last.module else ""
    return f"the {which}{where}" + (f" ({last.line})" if last.line else "")
