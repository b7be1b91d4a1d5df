"""Calibration of predictions to a device and its software by a handful of measured steps.

The heads of the device are fitted as those of a campaign (`physics_heads.train_heads`): from its
own heads if it has some, else from the constants of the most similar card, which move as far as
devices differ. To judge them, each step is left out once: it is predicted as `trappm predict`
would with the snapshot of the other steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from trappm.extensions.calibration.steps_file import MeasuredStep, Row, Unusable, read_steps
from trappm.prediction.models import input_size_of, size_kind, subject_of
from trappm.prediction.prediction import METRIC_NAMES
from trappm.prediction.question import Question
from trappm.prediction.selection import Selection, device_title, load_snapshots
from trappm.profiler.devices.catalogue import known_spec, read_name
from trappm.profiler.errors import InputError, TrappmError, one_line
from trappm.profiler.host.environment import data_folder, independent_of_caller
from trappm.profiler.records import (
    METRICS,
    Configuration,
    Execution,
    Phase,
    Watch,
    is_cpu_device,
    number_text,
)

if TYPE_CHECKING:
    from trappm.learner.heads.physics_heads import Head
    from trappm.learner.interface import TrainedHeads, TrainingLabel, Workload
    from trappm.learner.physics.prior import Prior
    from trappm.learner.snapshots.snapshot import Snapshot, SnapshotInfo
    from trappm.learner.stats.errors import Accuracy
    from trappm.prediction.models import Subject
    from trappm.prediction.prediction import Prediction

CALIBRATION = "calibration"
"""Name in place of a campaign's in the manifests of calibrations."""
CALIBRATED = ("step_time_ms", "memory_mib")
"""Metrics that steps may have."""
MIN_STEPS = 3
"""Least number of steps of a metric and phase: a head needs two, and one is left out."""
ANY_DISTANCE = 1e9
"""Distance from the steps that no model has, in standard deviations of features."""
SHOWN = 3
"""Largest number of rows that an error names."""
SEED = 1337


@dataclass(frozen=True, kw_only=True)
class MetricGain:
    """Errors of one metric on steps that were left out, before and after the calibration."""

    phase: Phase
    metric: str
    steps: int
    """Number of steps with the metric."""
    before_percent: float | None
    """Mean absolute percentage error; None if it was not predicted."""
    after_percent: float | None

    @property
    def is_better(self) -> bool:
        if self.before_percent is None or self.after_percent is None:
            return self.after_percent is not None
        return self.after_percent < self.before_percent

    def __str__(self) -> str:
        of_phase = "" if self.phase is Phase.TRAIN else " of inference"
        before, after = map(_percent, (self.before_percent, self.after_percent))
        verdict = "" if self.is_better else ", calibration did not help"
        return f"{METRIC_NAMES[self.metric]}{of_phase} {before} before, {after} after{verdict}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "is_better": self.is_better}


@dataclass(frozen=True, kw_only=True)
class CalibrationReport:
    """Gains of a calibration, and its snapshot."""

    device: str
    device_name: str
    steps: int
    """Number of steps that were used."""
    gains: tuple[MetricGain, ...]
    unusable: tuple[Unusable, ...]
    """Rows of the file that were left out."""
    snapshot: str | None
    """Id of the snapshot; None if no metric got better."""
    folder: Path | None
    remarks: tuple[str, ...] = ()

    @property
    def next_command(self) -> str | None:
        """Return the command that predicts with the snapshot; None without one."""
        if self.folder is None:
            return None
        at_home = self.folder.parent == _home()
        name = self.folder.name[:8] if at_home else self.folder
        return f"trappm predict MODEL --device {self.device} --snapshot {name}"

    def __str__(self) -> str:
        """Return the errors with and without the calibration in one sentence."""
        errors = "; ".join(map(str, self.gains))
        return f"{self.steps} steps on {self.device_name}: {errors}."

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "sentence": str(self),
            **asdict(self),
            "gains": [gain.to_dict() for gain in self.gains],
            "unusable": [row._asdict() for row in self.unusable],
            "folder": None if self.folder is None else str(self.folder),
            "next_command": self.next_command,
        }


@independent_of_caller
def calibrate(
    steps: str | Path,
    *,
    device: str,
    snapshot: str | Path | None = None,
    to: str | Path | None = None,
    on_progress: Watch = lambda done, total, what: None,
) -> CalibrationReport:
    """Adjust predictions to a device and its software by a handful of measured steps.

    A metric that the calibration does not improve keeps its earlier head, or has none.

    Args:
        steps: File of the steps: a table (.csv), or labels (.jsonl, .parquet).
        device: Device of the steps by any of its names.
        snapshot: Id, alias or folder of the snapshot to start from (default: as of `predict`).
        to: New folder for the snapshot (default: among those of TRAPPM_HOME).
        on_progress: Called with the number of finished items, of all items, and the current one.

    Raises:
        InputError: The file is malformed or has too few usable steps, or `to` exists.
        SnapshotError: There is no such device or snapshot, or it cannot be written.
    """
    if to is not None and Path(to).exists():
        raise InputError(f"{to} already exists; name a new folder")
    rows, unusable = read_steps(Path(steps))
    # An earlier calibration may have learned from the same steps.
    base = [one for one in load_snapshots(snapshot) if one.manifest.campaign != CALIBRATION]
    if not base:
        raise InputError(f"snapshot {snapshot} is a calibration; name the one that it started from")
    [key] = Selection(Question(), base).device_keys(device, None)
    traced = list[_TracedStep]()
    for done, row in enumerate(rows):
        on_progress(done, len(rows), f"tracing {row.step}")
        try:
            traced.append(_trace(row, key, base))
        except TrappmError as error:
            unusable.append(Unusable(row.number, one_line(error)))
    parts = [part for phase in Phase if (part := _PhaseSteps.of(phase, traced))]
    used = [step for part in parts for step in part.steps]
    unusable += [
        Unusable(step.row, f"{MIN_STEPS} or more of a metric and phase are needed")
        for step in traced
        if step not in used
    ]
    unusable.sort()
    if not parts:
        shown = [*map(str, unusable[:SHOWN]), *(["..."] if len(unusable) > SHOWN else [])]
        raise InputError(
            f"a calibration needs {MIN_STEPS} usable steps of one phase; "
            f"{'; '.join([f'{Path(steps).name} has {len(traced)}', *shown])}"
        )
    fits = _Fits(key, base, sum(len(part.steps) + 1 for part in parts), on_progress)
    heads, errors, gains = fits.earlier(), dict[str, Any](), list[MetricGain]()
    for part in parts:
        judged, accuracies = fits.judge(part)
        gains += judged
        better = [gain.metric for gain in judged if gain.is_better]
        if better:
            heads[part.phase] = fits.fit(replace(part, metrics=better))
            errors[part.phase] = {metric: accuracies[metric] for metric in better}
    made = fits.publish(heads, used, errors, None if to is None else Path(to)) if errors else None
    return CalibrationReport(
        device=key,
        device_name=device_title(fits.card),
        steps=len(used),
        gains=tuple(gains),
        unusable=tuple(unusable),
        snapshot=None if made is None else made.id,
        folder=None if made is None else made.folder,
        remarks=tuple(_remarks(used)),
    )


def _remarks(steps: Sequence[_TracedStep]) -> Iterator[str]:
    """Yield what the errors of these steps do not show."""
    models = {step.step.model for step in steps}
    if len(models) < len(steps):
        of = "one model" if len(models) == 1 else f"{len(models)} models"
        yield f"The steps are of {of}; errors on other models may be larger."


@dataclass(frozen=True, kw_only=True, eq=False)
class _TracedStep:
    """A measured step with its trace, and its prediction before the calibration."""

    row: int
    """Number of its row in the file."""
    step: MeasuredStep
    provenance: str
    subject: Subject
    question: Question
    workload: Workload
    before: Prediction

    def predict(self, device: str, snapshots: Sequence[Snapshot]) -> Prediction:
        return _predict(self.question, self.subject, device, snapshots)

    def label(self, device: str, card: str, metrics: Sequence[str]) -> TrainingLabel:
        """Return the label with these metrics alone."""
        from trappm.learner.interface import TrainingLabel

        step = self.step
        configuration = Configuration(
            architecture=step.model,
            batch_size=step.batch_size,
            input_size=input_size_of(step.model, step.input_size),
            phase=step.phase,
            **step.settings._asdict(),
        )
        return TrainingLabel(
            configuration_id=configuration.id,
            device=device,
            role="train",
            values=tuple(step.value(metric) if metric in metrics else None for metric in METRICS),
            provenance=self.provenance,
            card=card,
        )


def _trace(row: Row, device: str, base: Sequence[Snapshot]) -> _TracedStep:
    """Trace a step and predict it; raise TrappmError if it cannot be used."""
    from trappm.learner.interface import Workload
    from trappm.profiler.models.own_modules import is_own_module

    step = row.step
    if is_own_module(step.model):
        raise InputError("it names code to import, which a file may not; measure it in a campaign")
    if step.execution is Execution.COMPILE:
        raise InputError("it is compiled, and heads learn from eager steps only")
    if step.device is not None and not _is_same(step.device, device):
        raise InputError(f"it was measured on {step.device}, not on {device}")
    is_text = size_kind(step.model) == "tokens"
    subject = subject_of(
        step.model,
        input_size=None if is_text else step.input_size,
        sequence_length=step.input_size if is_text else None,
    )
    question = Question(
        batch_size=step.batch_size,
        phase=step.phase,
        precision=step.precision,
        memory_format=step.memory_format,
        optimizer=step.optimizer.value,
    )
    selection = Selection(question, base)
    if gap := selection.gap(device):
        raise InputError(gap)
    before = _predict(question, subject, device, base)
    return _TracedStep(
        row=row.number,
        step=step,
        provenance=row.provenance.value,
        subject=subject,
        question=question,
        workload=Workload.of(
            subject.trace(step.settings, step.phase, step.batch_size),
            step.settings,
            batch_size=step.batch_size,
            with_kernels=known_spec(selection.snapshot_for(device).card(device)) is not None,
        ),
        before=before,
    )


def _is_same(name: str, device: str) -> bool:
    """Return whether a step's device can be the one to calibrate."""
    if is_cpu_device(name) or is_cpu_device(device):
        return name == device
    return read_name(name).may_be(read_name(device))


def _predict(
    question: Question, subject: Subject, device: str, snapshots: Sequence[Snapshot]
) -> Prediction:
    """Predict a step with these snapshots."""
    from trappm.prediction.answer import answer_questions

    [prediction] = answer_questions([(Selection(question, snapshots), subject, device)])
    return prediction


@dataclass(frozen=True, eq=False)
class _PhaseSteps:
    """Steps of one phase, enough to calibrate a metric or more."""

    phase: Phase
    steps: Sequence[_TracedStep]
    metrics: Sequence[str]
    """Metrics to calibrate; at least `MIN_STEPS` steps of the file have each."""

    @classmethod
    def of(cls, phase: Phase, steps: Sequence[_TracedStep]) -> Self | None:
        """Return the steps of a phase, and the metrics of enough of them; None without any."""
        own = [step for step in steps if step.step.phase is phase]
        counts = {m: sum(step.step.value(m) is not None for step in own) for m in CALIBRATED}
        metrics = [metric for metric, count in counts.items() if count >= MIN_STEPS]
        used = [step for step in own if any(step.step.value(m) is not None for m in metrics)]
        return cls(phase, used, metrics) if metrics else None

    def without(self, place: int) -> Self:
        """Return all steps but one."""
        return replace(self, steps=[*self.steps[:place], *self.steps[place + 1 :]])


class _Fits:
    """Fits of a device's heads, and snapshots of them.

    Args:
        device: Key of the device.
        base: Snapshots to start from.
        total: Number of fits, for the progress.
        watch: Called before each fit, as `on_progress` of `calibrate`.
    """

    def __init__(self, device: str, base: Sequence[Snapshot], total: int, watch: Watch) -> None:
        self._device, self._base = device, base
        self._done, self._total, self._watch = 0, total, watch
        self.card = self._of_phase(Phase.TRAIN).card(device)
        """Card of the device."""

    def _of_phase(self, phase: Phase) -> Snapshot:
        return Selection(Question(phase=phase), self._base).snapshot_for(self._device)

    def earlier(self) -> dict[Phase, TrainedHeads]:
        """Return the heads that the device has already, by phase.

        Memory of labels with more than a plain process is left out: steps are of a plain process.
        """
        from trappm.learner.heads.physics_heads import Heads

        earlier = {}
        for phase in Phase:
            known = self._of_phase(phase).heads.get(self._device, {}).get(phase)
            if known is not None and isinstance(known.heads, Heads):
                plain = {m: head for m, head in known.heads.heads.items() if not head.excess}
                earlier[phase] = replace(known, heads=replace(known.heads, heads=plain))
        return {phase: known for phase, known in earlier.items() if known.heads.metrics}

    def fit(self, part: _PhaseSteps) -> TrainedHeads:
        """Fit heads of the metrics to steps; other metrics keep their earlier heads."""
        from trappm.learner.heads.physics_heads import Heads, similar_constants, train_heads
        from trappm.learner.interface import TrainedHeads, targets_of
        from trappm.learner.paper.presets import LAPTOP
        from trappm.learner.stats.folds import content_groups

        self._watch(self._done, self._total, "fitting")
        self._done += 1
        earlier = self.earlier().get(part.phase)
        start = None if earlier is None else earlier.heads
        workloads = [step.workload for step in part.steps]
        heads = train_heads(
            workloads,
            targets_of(self._labels(part.steps, part.metrics)),
            groups=content_groups([step.step.model for step in part.steps], workloads),
            preset=LAPTOP.head,
            generator=np.random.default_rng(SEED),
            spec=known_spec(self.card),
            similar=similar_constants(self.card),
            init=start,
        )
        assert isinstance(heads, Heads)  # noqa: S101  (of this preset)
        counts = Counter(step.step.settings for step in part.steps)
        settings = dict.fromkeys(row for row, _ in counts.most_common())
        fitted = dict(heads.heads)
        if "memory_mib" in fitted:
            fitted["memory_mib"] = _answering_all(fitted["memory_mib"])
        if earlier is not None and isinstance(start, Heads):
            fitted = {**start.heads, **fitted}
            settings |= dict.fromkeys(earlier.settings)
        return TrainedHeads(replace(heads, heads=fitted), tuple(settings))

    def _labels(
        self, steps: Sequence[_TracedStep], metrics: Sequence[str] = CALIBRATED
    ) -> list[TrainingLabel]:
        return [step.label(self._device, self.card, metrics) for step in steps]

    def judge(self, part: _PhaseSteps) -> tuple[list[MetricGain], dict[str, Accuracy]]:
        """Return the gain of each metric, and its errors, on steps left out one at a time."""
        from trappm.learner.snapshots.snapshot import load_snapshot

        after: list[Prediction] = []
        for place, step in enumerate(part.steps):
            others = part.without(place)
            with TemporaryDirectory() as folder:
                made = self._save(Path(folder), {part.phase: self.fit(others)}, others.steps, {})
                after.append(step.predict(self._device, [load_snapshot(made.folder)]))
        before = [step.before for step in part.steps]
        gains: list[MetricGain] = []
        errors: dict[str, Accuracy] = {}
        for metric in part.metrics:
            measured = [step.step.value(metric) for step in part.steps]
            later = _accuracy(metric, measured, after)
            # Both are compared on the steps that had a prediction before, if any had.
            judged = [
                value if getattr(made, metric) is not None else None
                for value, made in zip(measured, before, strict=True)
            ]
            earlier = _accuracy(metric, judged, before)
            if earlier is not None:
                later = _accuracy(metric, judged, after)
            gains.append(
                MetricGain(
                    phase=part.phase,
                    metric=metric,
                    steps=sum(value is not None for value in measured),
                    before_percent=earlier and earlier["mape"],
                    after_percent=later and later["mape"],
                )
            )
            if later is not None:
                errors[metric] = later
        return gains, errors

    def publish(
        self,
        heads: Mapping[Phase, TrainedHeads],
        steps: Sequence[_TracedStep],
        errors: Mapping[str, Any],
        to: Path | None,
    ) -> SnapshotInfo:
        """Write the snapshot into a new folder, or among those of TRAPPM_HOME."""
        from trappm.learner.snapshots.snapshot import copy_snapshot

        if to is None:
            return self._save(_home(), heads, steps, errors)
        with TemporaryDirectory() as folder:
            return copy_snapshot(self._save(Path(folder), heads, steps, errors).folder, to)

    def _save(
        self,
        registry: Path,
        heads: Mapping[Phase, TrainedHeads],
        steps: Sequence[_TracedStep],
        errors: Mapping[str, Any],
    ) -> SnapshotInfo:
        from trappm.learner.heads.physics_heads import known_of_others
        from trappm.learner.paper.presets import LAPTOP
        from trappm.learner.snapshots.snapshot import save_snapshot

        return save_snapshot(
            registry,
            others=known_of_others()[0],
            heads={self._device: heads},
            source_device=self._device,
            preset=LAPTOP,
            labels=self._labels(steps),
            fields={
                "campaign": CALIBRATION,
                "errors": {self._device: errors},
                "split": "each step left out once",
                "cards": {self._device: self.card},
            },
        )


def _answering_all(head: Head[Prior]) -> Head[Prior]:
    """Return a memory head for which no model is unlike the steps.

    A handful of steps resembles few models, and the memory of others would be simulated without the
    constants that the steps have moved. Ten labels of GPUMemNet's A100, with a GiB more than a
    plain process, left errors of 4.8 % so, 14.4 % otherwise, and 27 % uncalibrated (leave-one-out,
    medians of five draws).
    """
    if head.familiarity is None:
        return head
    return replace(head, familiarity=replace(head.familiarity, reach=ANY_DISTANCE))


def _accuracy(
    metric: str, measured: Sequence[float | None], predictions: Sequence[Prediction]
) -> Accuracy | None:
    """Return the errors of the predictions of a metric; None if no step has both values."""
    from trappm.learner.stats.errors import accuracy

    rows = [
        (value, predicted, *prediction.intervals[metric])
        for value, prediction in zip(measured, predictions, strict=True)
        if value is not None and (predicted := getattr(prediction, metric)) is not None
    ]
    return accuracy(*np.array(rows).T) if rows else None


def _home() -> Path:
    return data_folder() / "snapshots"


def _percent(error: float | None) -> str:
    return "not predicted" if error is None else f"{number_text(error, 3)} % off"
