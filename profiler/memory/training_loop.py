"""Allocations of a training loop around forward and backward pass, as PyTorch 2.13 on CUDA.

    zero_grad   frees the gradients, or keeps them
    backward    once for each micro-step; the second adds its gradients to those of the first
    step        the optimizer: states in the first step, temporaries in every one

The rules follow torch/optim; tests compare them with real allocations. What `GradScaler` and
clipping allocate is left out: numbers of 512 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, StrEnum

from trappm.profiler.errors import InputError
from trappm.profiler.memory.allocator import Allocator, Block
from trappm.profiler.records import Optimizer, member

_SCALAR = 1
"""Size of a tensor with one number, in units of 512 bytes."""


class Implementation(StrEnum):
    """Implementation of an optimizer in `torch.optim`."""

    PLAIN = "plain"
    """One parameter after the other (`foreach=False`)."""
    FOREACH = "foreach"
    """All parameters at once, operator by operator: the default on CUDA."""
    FUSED = "fused"
    """All parameters in one kernel (`fused=True`)."""


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters with the same options of the optimizer: a group of `torch.optim`."""

    optimizer: Optimizer
    implementation: Implementation = Implementation.FOREACH
    weight_decay: bool = False
    """True if it is above 0."""
    places: tuple[int, ...] | None = None
    """Places of the parameters among those of the module, in order; None for all."""

    def among(self, places: Sequence[int]) -> list[int]:
        """Return the indices of those of these parameters that belong to the group."""
        if self.places is None:
            return [*range(len(places))]
        own = frozenset(self.places)
        return [index for index, place in enumerate(places) if place in own]

    def step(self, memory: Allocator, sizes: Sequence[int], *, first: bool) -> None:
        """Replay the step of the optimizer for parameters of these sizes, in units."""
        fused = self.implementation is Implementation.FUSED
        if first and (fused or self.optimizer.is_adam):
            counts = [_SCALAR] * (fused and self.optimizer.is_adam)  # else on the host
            for size in sizes:
                _allocate(memory, [*counts, *[size] * self.optimizer.states_per_parameter])
        if self.implementation is Implementation.FOREACH:
            self._step_at_once(memory, sizes, first=first)
        elif self.implementation is Implementation.PLAIN:
            self._step_in_turn(memory, sizes, first=first)

    @property
    def _adds_decay(self) -> bool:
        """Return whether copies of gradients get the weight decay; AdamW changes the weights."""
        return self.weight_decay and self.optimizer is not Optimizer.ADAMW

    def _step_at_once(self, memory: Allocator, sizes: Sequence[int], *, first: bool) -> None:
        with _passing(memory, sizes if self._adds_decay else ()):
            if first and self.optimizer is Optimizer.MOMENTUM:
                _allocate(memory, sizes)
        if self.optimizer.is_adam:
            with _passing(memory, sizes):  # roots of the second moments
                pass

    def _step_in_turn(self, memory: Allocator, sizes: Sequence[int], *, first: bool) -> None:
        divisor: Block | None = None
        for size in sizes:
            with _passing(memory, [size] if self._adds_decay else ()):
                if first and self.optimizer is Optimizer.MOMENTUM:
                    memory.allocate(size)
                if self.optimizer.is_adam:
                    before = divisor  # Python holds it until there is the next
                    with _passing(memory, [size]):  # root of the second moment
                        divisor = memory.allocate(size)
                    if before is not None:
                        memory.free(before)
        if divisor is not None:
            memory.free(divisor)


@dataclass(frozen=True, kw_only=True)
class TrainingLoop:
    """A training loop around a step in fp32.

    Raises:
        InputError: Fewer than one accumulation step.
    """

    optimizer: Optimizer = Optimizer.SGD
    implementation: Implementation = Implementation.FOREACH
    weight_decay: bool = False
    """True if it is above 0, as by default in AdamW alone."""
    groups: tuple[ParameterGroup, ...] = ()
    """Groups of an optimizer with several kinds of parameters, or without some of them; then the
    three fields above are those of most parameters."""
    accumulation_steps: int = 1
    """Forward and backward passes before each step of the optimizer."""
    set_to_none: bool = True
    """True if `zero_grad` frees the gradients, which is its default."""
    cudnn_benchmark: bool = False
    """True if cuDNN searches for the fastest algorithm of each new convolution.

    After a search PyTorch returns unused segments (`emptyCache` in
    aten/src/ATen/native/cudnn/Conv_v7.cpp).
    """

    expandable_segments: bool = False
    """True with `PYTORCH_ALLOC_CONF=expandable_segments:True`, in inference as well."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "optimizer", member("optimizer", Optimizer, self.optimizer))
        passes = self.accumulation_steps
        if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
            raise InputError(f"accumulation is {passes!r}; it must be a whole number of 1 or more")

    def held(self, places: Sequence[int]) -> list[int]:
        """Return the indices of the parameters that the optimizer holds, by their places."""
        return sorted({index for group in self.parameter_groups for index in group.among(places)})

    def kept_gradients(self, places: Sequence[int]) -> list[int]:
        """Return the indices of the parameters whose gradients exist during a forward pass.

        Those of earlier passes, and those of parameters that are in no group of the optimizer:
        `zero_grad` of the optimizer does not free them.
        """
        if self.accumulation_steps > 1 or not self.set_to_none:
            return [*range(len(places))]
        held = frozenset(self.held(places))
        return [index for index in range(len(places)) if index not in held]

    @property
    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        """Return the groups; a single one of all parameters unless there are others."""
        return self.groups or (
            ParameterGroup(
                optimizer=self.optimizer,
                implementation=self.implementation,
                weight_decay=self.weight_decay,
            ),
        )

    def state_bytes(self, parameter_bytes: Sequence[int], places: Sequence[int]) -> int:
        """Return the bytes of the states that the optimizer keeps.

        Args:
            parameter_bytes, places: Bytes of each parameter with a gradient, and its place among
                the parameters of the module.
        """
        return sum(
            group.optimizer.states_per_parameter * parameter_bytes[index]
            for group in self.parameter_groups
            for index in group.among(places)
        )

    def update(
        self, memory: Allocator, sizes: Sequence[int], places: Sequence[int], *, first: bool
    ) -> None:
        """Replay what comes between the last backward pass and the next step.

        Args:
            memory: Allocator with the gradients.
            sizes, places: Size in units of each parameter with a gradient, which may be 0, and its
                place among the parameters of the module.
            first: Whether this is the first step, which makes the states.
        """
        for group in self.parameter_groups:
            own = [size for index in group.among(places) if (size := sizes[index])]
            group.step(memory, own, first=first)


DEFAULT_LOOP = TrainingLoop()
"""SGD, and PyTorch's defaults on CUDA."""


def _allocate(memory: Allocator, sizes: Sequence[int]) -> list[Block]:
    return [memory.allocate(size) for size in sizes]


@contextmanager
def _passing(memory: Allocator, sizes: Sequence[int]) -> Iterator[None]:
    """Allocate blocks within the block of code only."""
    blocks = _allocate(memory, sizes)
    yield
    for block in reversed(blocks):
        memory.free(block)


class Loop(Enum):
    """Training loops of labels, for any optimizer."""

    PLAIN = "plain"
    """Our protocol (`profiler.steps.step`): PyTorch's defaults."""
    TUNED = "tuned"
    """Loop of the published A100 labels: SGD has momentum, weight decay, and cuDNN's benchmark."""

    def with_optimizer(self, optimizer: Optimizer) -> TrainingLoop:
        tuned = self is Loop.TUNED
        if tuned and optimizer is Optimizer.SGD:
            optimizer = Optimizer.MOMENTUM
        decays = tuned or optimizer is Optimizer.ADAMW
        return TrainingLoop(optimizer=optimizer, weight_decay=decays, cudnn_benchmark=tuned)
