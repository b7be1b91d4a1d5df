"""`trappm.advise`: the changes that make a step fit its GPU, or a run end in time.

Every figure is that of `trappm.predict`, or of `trappm scale` for several GPUs. A change whose step
does not fit at the whole batch is tried with fewer samples per pass and accumulated gradients, so
each optimizer step still has the batch that was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from trappm.extensions.advice import changes
from trappm.extensions.advice.changes import AS_IT_IS, Change
from trappm.extensions.advice.checkpoints import plan_checkpoints
from trappm.extensions.advice.guard import check_limit_of_run
from trappm.prediction import cost
from trappm.prediction.comparison import cheapest_usd
from trappm.prediction.fit import MemoryAnswer
from trappm.prediction.models import Subject, subject_of
from trappm.prediction.question import Question
from trappm.prediction.selection import (
    Selection,
    catalogue_keys,
    device_title,
    precision_gap,
    read_manifests,
)
from trappm.profiler.devices.catalogue import arithmetic_of, card_capacity_mib
from trappm.profiler.errors import InputError, TrappmError, UnsupportedModelError
from trappm.profiler.host.environment import independent_of_caller
from trappm.profiler.models.known_names import is_file, refuse_unknown
from trappm.profiler.records import Phase, Precision

if TYPE_CHECKING:
    from torch import nn

    from trappm.prediction.prediction import Prediction

STRATEGIES, GPU_COUNTS = ("ddp", "fsdp"), (2, 4, 8)
"""Strategies and numbers of GPUs that are tried."""
MAX_CARDS = 3
"""Largest number of other cards in the advice."""
SAME_TIME = 0.01
"""Difference of times, as a share of the step as it is, that no change is chosen for."""


@dataclass(frozen=True, kw_only=True)
class AdvisedStep(MemoryAnswer):
    """A changed step, and what it takes."""

    change: str
    """Such as `amp-bf16, 2 passes of 32`."""
    device: str
    gpus: int = 1
    batch_size: int
    """Samples per pass and GPU."""
    accumulation: int
    """Passes per optimizer step."""
    step_time_ms: float
    """Time of an optimizer step."""
    slower: float
    """Time per sample relative to that of the step as it is, less 1."""
    memory_mib: float | None
    capacity_mib: float | None
    intervals: Mapping[str, tuple[float, float]]
    run: cost.Run | None = None
    is_same_training: bool = True
    """False if the change affects the arithmetic, what is trained, or how."""
    is_other_hardware: bool = False
    blocks: tuple[str, ...] = ()
    """Blocks that are checkpointed."""
    python: tuple[str, ...] = ()
    """Lines of Python that make the change."""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The step as it is, and the changes of it in the order of the time that they cost."""

    before: Prediction
    max_hours: float | None
    changes: tuple[AdvisedStep, ...]
    """Changes that reach the goal, those on the same card first; if none does, all of them."""
    is_reached: bool
    """True if these reach the goal, or the step does as it is."""
    has_batch_norm: bool = False
    """True if the model may have batch norms, which see the samples of one pass on one GPU."""
    remarks: tuple[str, ...] = ()
    """Why changes were not tried, and what is to be known of one."""

    @property
    def is_needed(self) -> bool:
        """True if the step as it is does not reach the goal."""
        return bool(self.changes) or not self.is_reached

    @property
    def cheapest(self) -> AdvisedStep | None:
        """The first change, if it reaches the goal."""
        return self.changes[0] if self.changes and self.is_reached else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "sentence": str(self),
            "before": self.before.to_dict(),
            "max_hours": self.max_hours,
            "is_needed": self.is_needed,
            "is_reached": self.is_reached,
            "changes": [change.to_dict() for change in self.changes],
            "remarks": list(self.remarks),
        }

    def __str__(self) -> str:
        goal = f"fits {self.before.device_name}"
        if self.max_hours is not None:
            goal += f" and ends within {self.max_hours:g} h"
        if not self.is_needed:
            return f"No change is needed: {self.before.model} {goal}."
        if self.cheapest is None:
            return f"No change was found with which {self.before.model} surely {goal}."
        text = f"Cheapest change: {_words(self.cheapest)}."
        kept = next((step for step in self.changes if step.is_same_training), self.cheapest)
        return text if kept is self.cheapest else f"{text} With the same training: {_words(kept)}."


def _words(step: AdvisedStep) -> str:
    return f"{step.change} ({percent(step.slower)} time)"


def percent(share: float) -> str:
    """Return such as `+12 %`."""
    return f"{round(100 * share):+d} %"


@independent_of_caller
def advise(
    model: str | Path | nn.Module,
    *,
    device: str | None = None,
    batch_size: int | None = None,
    max_hours: float | None = None,
    input_size: int | None = None,
    sequence_length: int | None = None,
    example_input: Any = None,
    targets: Any = None,
    loss: Callable[..., Any] | None = None,
    **settings: Any,
) -> Advice:
    """Return the cheapest changes with which a training step fits, or a run ends in time.

    >>> import trappm
    >>> trappm.advise("test_vit", batch_size=8, device="a100").is_needed
    False

    Args:
        model: A timm name, a transformer such as `hf:gpt2`, the path of an ONNX file, or a module.
        device: Device by any of its names (default: `DEFAULT_DEVICE`).
        batch_size: Samples per optimizer step (default: that of the example or the file, or 1).
        max_hours: Time within which the run must end; needs `epochs` and `samples`.
        input_size, sequence_length, example_input, targets, loss: As for `trappm.predict`.
        **settings: Other settings of `trappm.predict`: `precision`, `memory_format`, `optimizer`,
            `accumulation`, `snapshot`, `epochs`, `samples`, `usd_per_hour`.

    Raises:
        InputError: The device is no GPU, a limit has no run, or the phase is not training.
        UnsupportedModelError: Memory or step time of the step as it is are not predicted.
        TrappmError: As `trappm.predict`.
    """
    if (phase := settings.pop("phase", Phase.TRAIN)) != Phase.TRAIN:
        raise InputError(f"phase is {phase!r}, but advice is about training; leave phase out")
    check_limit_of_run("max hours", max_hours, settings.get("epochs"))
    selection = Selection(Question(phase=Phase.TRAIN, batch_size=batch_size, **settings))
    [key] = selection.device_keys(device, None)
    if card_capacity_mib(key) is None:
        raise InputError(f"the memory of {key} is unknown; name a GPU, such as a100")
    if isinstance(model, str) and not is_file(model):
        refuse_unknown(model)
    given: dict[str, Any] = {"example_input": example_input, "targets": targets, "loss": loss}
    sizes: dict[str, Any] = {"input_size": input_size, "sequence_length": sequence_length}
    question = _TrainingQuestion(
        subject=subject_of(model, **sizes, **given),
        device=key,
        settings=settings | {"batch_size": batch_size},
        sizes=sizes,
        again=lambda module: subject_of(module, **given),
        max_hours=max_hours,
    )
    before = replace(question.predict(), device_is_default=selection.device_is_default)
    if before.step_time_ms is None or before.memory_mib is None:
        raise UnsupportedModelError(" ".join(before.gaps()))
    if question.is_reached_by(before):
        return Advice(before=before, max_hours=max_hours, changes=(), is_reached=True)
    pinned = {name: getattr(before, name) for name in ("batch_size", "precision", "memory_format")}
    pinned["optimizer"] = before.loop or before.optimizer
    search = _Search(replace(question, settings=question.settings | pinned), before)
    steps = search.steps()
    reaching = [step for step in steps if question.is_reached_by(step)]
    return Advice(
        before=before,
        max_hours=max_hours,
        changes=tuple(sorted(reaching or steps, key=lambda s: (s.is_other_hardware, s.slower))),
        is_reached=bool(reaching),
        has_batch_norm=search.has_batch_norm,
        remarks=tuple(search.remarks),
    )


@dataclass(frozen=True, kw_only=True)
class _TrainingQuestion:
    """A question about one model on one card, from which changed ones are made."""

    subject: Subject
    device: str
    settings: dict[str, Any]
    sizes: dict[str, Any]
    again: Callable[[nn.Module], Subject]
    """Returns the subject of a module with the inputs of the question."""
    max_hours: float | None

    def predict(
        self, change: Change = AS_IT_IS, device: str | None = None, **settings: Any
    ) -> Prediction:
        """Predict the changed step, perhaps on another card; raises as `answer_questions`."""
        from trappm.prediction.answer import answer_questions

        subject = change.subject or self.subject
        if change.model is not None:
            subject = subject_of(change.model, **self.sizes)
        question = Question(**{**self.settings, **change.settings, **settings})
        [step] = answer_questions([(Selection(question), subject, device or self.device)])
        return step

    def is_reached_by(self, step: Prediction | AdvisedStep) -> bool:
        """Return whether a step surely fits, and its run surely ends in time."""
        if not step.fits or self.max_hours is None:
            return bool(step.fits)
        return step.run is not None and step.run.high_hours <= self.max_hours


@dataclass
class _Search:
    """Search for changes of a step that does not reach its goal."""

    question: _TrainingQuestion
    before: Prediction
    remarks: dict[str, None] = field(default_factory=dict)
    """Why changes were not tried, and what is to be known of one."""

    def steps(self) -> list[AdvisedStep]:
        """Return the changed steps that are in some way better than the step as it is."""
        as_it_is = self._advised(self.before, change="", run=self.before.run)
        steps = [as_it_is]
        for change in self._changes():
            with self._noting(change.name):
                made = self._fitted(change)
                if made is not None and not any(_is_no_better(made, step) for step in steps):
                    steps.append(made)
                    if change.remark is not None:
                        self.remarks[change.remark] = None
        return [*steps[1:], *self._on_several_gpus(), *self._on_other_cards()]

    def _changes(self) -> Iterator[Change]:
        """Yield the changes to try on the same card."""
        before, question = self.before, self.question
        yield AS_IT_IS
        if not before.fits:
            yield from changes.loop_changes(before)
            with self._noting("checkpoints"):
                yield self._checkpoints()
        card = before.card or before.device
        now = arithmetic_of(card, Precision(before.precision))
        able = [
            precision
            for precision in Precision
            if precision_gap(card, precision) is None and arithmetic_of(card, precision) != now
        ]
        yield from changes.precision_changes(before, able)
        with self._noting("adapters"):
            yield from changes.adapter_changes(before.model)
        if question.max_hours is not None:
            yield changes.COMPILED
            if (largest := before.largest_batch or 0) >= 2 * before.batch_size:
                yield changes.larger_batch(before.batch_size, largest)

    @cached_property
    def has_batch_norm(self) -> bool:
        """True if a pass or a GPU with fewer samples is another training: of batch norms."""
        before = self.before
        trace = self.question.subject.trace(before.settings, Phase.TRAIN, before.batch_size)
        return trace.kernels is None or trace.kernels.has_batch_norm

    def _checkpoints(self) -> Change:
        """Return the cheapest plan of blocks to checkpoint; raises as `plan_checkpoints`."""
        plan = plan_checkpoints(
            self.question.subject,
            self.before,
            lambda subject: self.question.predict(Change(name="checkpoints", subject=subject)),
            self.question.again,
        )
        return changes.checkpoint_change(plan.blocks, plan.block_count, plan.subject)

    @contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        """Turn an error within the block into a remark."""
        try:
            yield
        except TrappmError as error:
            self.remarks[f"Not tried: {what or 'gradient accumulation'} ({error})."] = None

    def _fitted(self, change: Change) -> AdvisedStep | None:
        """Return the changed step, in as few passes as fit; None if nothing differs."""
        before, question = self.before, self.question
        step = question.predict(change)
        if not step.fits:
            twice = question.predict(change, accumulation=2 * before.accumulation)
            sizes = range(1, min(before.batch_size - 1, twice.largest_batch or 0) + 1)
            batch = max((size for size in sizes if before.batch_size % size == 0), default=0)
            if batch:
                passes = before.accumulation * before.batch_size // batch
                step = question.predict(change, batch_size=batch, accumulation=passes)
        parts, python = [change.name] * bool(change.name), change.python
        is_divided = step.accumulation != before.accumulation
        if is_divided:
            parts.append(f"{step.accumulation} passes of {step.batch_size}")
        if is_divided or changes.is_of_loop(step.precision, before.precision):
            lines = changes.training_loop(step.precision, step.batch_size, step.accumulation)
            python = (*python, *lines)
        if not parts or step.step_time_ms is None:
            return None
        return self._advised(
            step,
            change=", ".join(parts),
            run=step.run,
            python=python,
            is_same_training=change.is_same_training and not (is_divided and self.has_batch_norm),
            blocks=change.blocks,
        )

    def _advised(self, step: Any, gpus: int = 1, **fields: Any) -> AdvisedStep:
        """Return a row of the advice from a prediction of one GPU or several."""
        before = self.before
        ms_per_sample, before_ms_per_sample = (
            cast("float", ms) / samples
            for ms, samples in (
                (step.step_time_ms, step.batch_size * step.accumulation * gpus),
                (before.step_time_ms, before.batch_size * before.accumulation),
            )
        )
        names = ("device", "batch_size", "accumulation", "step_time_ms", "memory_mib")
        return AdvisedStep(
            **{name: getattr(step, name) for name in names},
            gpus=gpus,
            capacity_mib=step.capacity_mib,
            intervals={name: step.intervals[name] for name in ("step_time_ms", "memory_mib")},
            slower=ms_per_sample / before_ms_per_sample - 1,
            **fields,
        )

    def _on_several_gpus(self) -> Iterator[AdvisedStep]:
        """Yield the smallest number of GPUs that reaches the goal, by strategy."""
        for strategy in STRATEGIES:
            for gpus in GPU_COUNTS:
                made = None
                with self._noting(f"{strategy} on {gpus} GPUs"):
                    made = self._shared(strategy, gpus)
                if made is not None and self.question.is_reached_by(made):
                    yield made
                    break

    def _shared(self, strategy: str, gpus: int) -> AdvisedStep | None:
        """Return the step on several GPUs; None without the extension that predicts it."""
        try:
            from trappm.extensions.parallel.scaling import scaling
        except ModuleNotFoundError:
            return None
        before, settings = self.before, self.question.settings
        is_divided = before.batch_size % gpus == 0
        loop = before.loop and replace(before.loop, accumulation_steps=1)
        [step], _ = scaling(
            [self.question.subject],
            [self.question.device],
            [gpus],
            [strategy],
            accumulation=before.accumulation,
            batch_size=before.batch_size // gpus if is_divided else before.batch_size,
            precision=before.precision,
            memory_format=before.memory_format,
            optimizer=loop or before.optimizer,
            snapshot=settings.get("snapshot"),
        )
        run = None
        if before.run is not None:
            prices = cost.prices_of(before.device, settings.get("usd_per_hour"), before.card)
            run = cost.run_of(
                epochs=before.run.epochs,
                samples=before.run.samples,
                batch_size=gpus * step.batch_size * step.accumulation,
                step_time_ms=(step.step_time_ms, *step.intervals["step_time_ms"]),
                energy_j=None,
                carbon_g_per_kwh=None,
                prices=tuple(replace(x, usd_per_hour=gpus * x.usd_per_hour) for x in prices),
            )
        return self._advised(
            step,
            gpus,
            change=f"{strategy} on {gpus} GPUs",
            run=run,
            is_same_training=is_divided and not self.has_batch_norm,
            is_other_hardware=True,
            python=changes.sharing(strategy, gpus, step.batch_size),
        )

    def _on_other_cards(self) -> list[AdvisedStep]:
        """Return the cards with a price that reach the goal at the least cost."""
        before, steps = self.before, list[tuple[float, AdvisedStep]]()
        for key in catalogue_keys(read_manifests(self.question.settings.get("snapshot"))):
            is_larger = (card_capacity_mib(key) or 0.0) > cast("float", before.capacity_mib)
            if key == before.device or not cost.prices_of(key) or not (is_larger or before.fits):
                continue
            with self._noting(device_title(key)):
                step = self.question.predict(device=key, usd_per_hour=None)
                if step.step_time_ms is not None and self.question.is_reached_by(step):
                    made = self._advised(
                        step, change=device_title(key), run=step.run, is_other_hardware=True
                    )
                    steps.append((cheapest_usd(step) or math.inf, made))
        return [made for _, made in sorted(steps, key=itemgetter(0))[:MAX_CARDS]]


def _is_no_better(step: AdvisedStep, other: AdvisedStep) -> bool:
    """Return whether another change is as fast in as few passes, and changes no more."""
    return (
        (other.is_same_training or not step.is_same_training)
        and other.slower <= step.slower + SAME_TIME
        and other.accumulation <= step.accumulation
        and (other.fits is True or (other.memory_mib or 0.0) <= (step.memory_mib or 0.0))
    )
