"""A plan of blocks to checkpoint, checked by tracing the model with these blocks wrapped.

Blocks are the innermost layers that a container repeats, such as `layer1.0` or `blocks.3`. A
checkpointed block keeps its inputs only, and its forward pass runs again in the backward pass
(`torch.utils.checkpoint`). Groups of blocks are ordered by the memory that they save per
millisecond of recomputation, and within a group from the model's first block on: the last blocks
are computed again while all others are still kept. The plan is the shortest beginning that fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

from trappm.prediction.models import Module, Subject, name_and_size, variant_of
from trappm.profiler.errors import UnsupportedModelError
from trappm.profiler.models.known_names import content_of, is_file
from trappm.profiler.records import Phase
from trappm.profiler.traced_step import Event, Trace, TraceSettings

if TYPE_CHECKING:
    from torch import nn

    from trappm.prediction.prediction import Prediction

MIN_LAYERS = 3
"""Least number of layers with parameters in a block; a convolution with its norm is none."""
MAX_GROUPS = 6
"""Largest number of groups, since each one is traced; more are merged by their parents."""
MIN_ADDED_MS = 1e-3
"""Least time of recomputation, since predicted times have errors."""


class CheckpointPlan(NamedTuple):
    """Blocks to checkpoint."""

    blocks: tuple[str, ...]
    block_count: int
    """Number of all blocks."""
    subject: Subject
    """The model with these checkpoints."""


def blocks_of(module: nn.Module) -> list[str]:
    """Return the paths of the innermost repeated blocks, in the model's order."""
    from torch import nn

    repeated = set[str]()
    for path, container in module.named_modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            continue
        kinds = Counter(type(child) for child in container.children())
        repeated |= {
            f"{path}.{name}".removeprefix(".")
            for name, child in container.named_children()
            if kinds[type(child)] > 1 and _layer_count(child) >= MIN_LAYERS
        }
    innermost = repeated - {path[:at] for path in repeated for at, c in enumerate(path) if c == "."}
    return [path for path, _ in module.named_modules() if path in innermost]


def _layer_count(module: nn.Module) -> int:
    """Return the number of layers in a module that have parameters of their own."""
    return sum(any(True for _ in m.parameters(recurse=False)) for m in module.modules())


def checkpointed(module: nn.Module, blocks: Sequence[str]) -> nn.Module:
    """Checkpoint these blocks of a module, which is changed, and return it."""
    from torch.utils.checkpoint import checkpoint

    for path in blocks:
        block = module.get_submodule(path)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return module


def plan_checkpoints(
    subject: Subject,
    before: Prediction,
    predict: Callable[[Subject], Prediction],
    again: Callable[[nn.Module], Subject],
) -> CheckpointPlan:
    """Return the cheapest plan of blocks with which the step fits, or else all blocks.

    Args:
        subject: The model.
        before: Step of the model without checkpoints.
        predict: Predicts the same step of another subject.
        again: Returns the subject of a module like that of the subject.

    Raises:
        UnsupportedModelError: The model is a file, or has no repeated blocks.
    """
    model = _Blocks.of(subject, again)
    subject_with = cache(model.checkpointing)

    def chosen(blocks: Sequence[str]) -> tuple[str, ...]:
        return tuple(path for path in model.blocks if path in blocks)

    def step(blocks: Sequence[str]) -> Prediction:
        return predict(subject_with(chosen(blocks)))

    groups = _groups(model.blocks)
    if len(groups) > 1:
        groups.sort(key=lambda group: _saved_bytes_per_ms(before, step(group)), reverse=True)
    order = [path for group in groups for path in group]
    count = len(order)
    too_few = 0 if step(order).fits else count
    while count - too_few > 1:
        middle = (count + too_few) // 2
        if step(order[:middle]).fits:
            count = middle
        else:
            too_few = middle
    blocks = chosen(order[:count])
    return CheckpointPlan(blocks, len(order), subject_with(blocks))


def _groups(blocks: Sequence[str]) -> list[list[str]]:
    """Return the blocks by their container, or by one further out if there are too many."""
    parents = dict(zip(blocks, blocks, strict=True))
    while True:
        parents = {path: parent.rpartition(".")[0] for path, parent in parents.items()}
        names = dict.fromkeys(parents.values())
        if len(names) <= MAX_GROUPS:
            return [[path for path in blocks if parents[path] == name] for name in names]


def _saved_bytes_per_ms(before: Prediction, after: Prediction) -> float:
    """Return how much less is kept for the backward pass, per time of recomputation."""
    added_ms = (after.step_time_ms or 0.0) - (before.step_time_ms or 0.0)
    return (_kept_bytes(before) - _kept_bytes(after)) / max(added_ms, MIN_ADDED_MS)


def _kept_bytes(step: Prediction) -> int:
    """Return the bytes of the tensors that are alive at the end of the forward pass."""
    trace = None
    if step.subject is not None:
        trace = step.subject.trace(step.settings, Phase.TRAIN, step.batch_size)
    if trace is None or trace.allocations is None:
        raise UnsupportedModelError(f"the step of {step.model} is not traced")
    allocations = trace.allocations
    forward = slice(allocations.end_of_forward)
    kinds, sizes = allocations.kinds[forward], allocations.sizes_at(step.batch_size)[forward]
    return int(sizes[kinds == Event.ALLOCATE].sum() - sizes[kinds == Event.FREE].sum())


@dataclass(frozen=True)
class _Blocks:
    """A model and its blocks."""

    blocks: Sequence[str]
    checkpointing: Callable[[tuple[str, ...]], Subject]
    """Returns the subject of the model with these blocks checkpointed."""

    @classmethod
    def of(cls, subject: Subject, again: Callable[[nn.Module], Subject]) -> _Blocks:
        from trappm.profiler.models.on_meta import on_meta

        if isinstance(subject, Module):
            module = subject.module
            model = cls(
                blocks_of(module),
                lambda blocks: again(checkpointed(on_meta(module, None), blocks)),
            )
        elif is_file(subject.name):
            raise UnsupportedModelError("the blocks of a file are not known")
        else:
            name, size = name_and_size(subject.name, subject.input_size)
            if "checkpointing" in name.split(","):
                raise UnsupportedModelError(f"all blocks of {name} are checkpointed")
            model = cls(
                blocks_of(on_meta(name, size)),
                lambda blocks: variant_of(
                    subject.name,
                    size,
                    f"{content_of(name)} checkpointing {blocks}",
                    CheckpointingTracer(name, size, blocks),
                ),
            )
        if not model.blocks:
            raise UnsupportedModelError(f"{subject.name} has no repeated blocks to checkpoint")
        return model


@dataclass(frozen=True)
class CheckpointingTracer:
    """Tracer of a named model with some blocks checkpointed."""

    model: str
    input_size: int
    blocks: tuple[str, ...]

    def trace(
        self, settings: TraceSettings, phase: Phase, batch_size: int | None, with_origins: bool
    ) -> Trace:
        """Return a step; arguments and errors as of `profiler.trace.trace`."""
        from trappm.profiler.models.on_meta import on_meta
        from trappm.profiler.models.sources import source_of
        from trappm.profiler.trace import trace

        return trace(
            checkpointed(on_meta(self.model, self.input_size), self.blocks),
            source_of(self.model).inputs(self.model, self.input_size),
            settings,
            phase,
            batch_size=batch_size,
            with_origins=with_origins,
        )
