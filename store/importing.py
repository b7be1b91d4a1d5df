"""Import of measurements from files.

A file is read twice: first every row is checked, and one bad row refuses the file; then the rows
are recorded in batches. An import that was interrupted is completed by repeating it, because an
attempt is recorded once.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from trappm.profiler.errors import InputError, UnknownArchitectureError
from trappm.profiler.models.known_names import content_of, is_prefixed
from trappm.profiler.records import Measurement, Outcome, Provenance
from trappm.profiler.records.step_scope import IN_TRAINING, RECORDED
from trappm.profiler.steps.sampling import summarize
from trappm.store.files import ImportReport, Verdict, read_file
from trappm.store.measurements import BATCH
from trappm.store.store import Store

_KNOWN = Verdict(kind="known", reason="recorded before")
_CONFLICT = Verdict(kind="rejected", reason="conflicts with what is there under its attempt key")


def import_file(store: Store, path: Path) -> ImportReport:
    """Record the measurements of an export, of the profiler or of a training callback.

    Raises:
        InputError: The file or one of its rows is invalid; nothing was recorded.
        StoreError: The store cannot be written; importing again completes it.
    """
    return record_verdicts(store, path.name, "TraPPM", lambda: _verdicts(path))


def record_verdicts(
    store: Store, file: str, source: str, read: Callable[[], Iterable[Verdict]]
) -> ImportReport:
    """Record the measurements of verdicts, all of which are checked first.

    Args:
        store: Where to record them.
        file: Name of the file, for the report.
        source: Name of the source, for the report.
        read: Returns the verdicts; it is called twice.

    Raises:
        InputError: A row is invalid; nothing was recorded.
        StoreError: The store cannot be written; importing again completes it.
    """
    reasons: Counter[tuple[str, str]] = Counter()
    counts: Counter[str] = Counter()
    verdicts = iter(read())
    while batch := [*itertools.islice(verdicts, BATCH)]:
        before = store.measurements.recorded_before(
            [v.measurement for v in batch if v.measurement is not None]
        )
        for verdict in batch:
            differs = None
            if verdict.measurement is not None:
                differs = before.get(verdict.measurement.attempt_key)
            final = verdict if differs is None else _CONFLICT if differs else _KNOWN
            reasons[final.kind, final.reason] += 1
            counts[final.kind] += 1
    new = store.measurements.record_many(v.measurement for v in read() if v.measurement is not None)
    return ImportReport(
        file=file,
        source=source,
        rows=counts.total(),
        new=new,
        counts=dict(counts),
        reasons=dict(reasons.most_common()),
    )


def _verdicts(path: Path) -> Iterator[Verdict]:
    """Yield what becomes of each row; records of a training are checked as such."""
    for number, verdict in enumerate(read_file(path), 1):
        record = verdict.measurement
        if record is None or not _is_of_training(record):
            yield verdict
        elif fault := _training_fault(record):
            raise InputError(f"{path.name}, row {number}: {fault}; nothing was imported")
        else:
            yield verdict


def _is_of_training(record: Measurement) -> bool:
    return record.protocol.name == IN_TRAINING or record.environment.get("source") == RECORDED


def _training_fault(record: Measurement) -> str | None:
    """Return why this is not what a training callback records; None if it is.

    Nobody kept the machine of a training quiet, so its records have a protocol of their own, which
    heads do not learn from.
    """
    from trappm.profiler.models.zoo import native_input_size

    environment = record.environment
    if (
        record.protocol.name != IN_TRAINING
        or record.provenance is not Provenance.IMPORTED
        or environment.get("source") != RECORDED
        or "measuring_version" in environment
    ):
        return "its protocol or environment says that it was not recorded in training"
    if record.outcome is not Outcome.OK or record.step is None:
        return f"its outcome is {record.outcome}; a training's record is of steps that ended"
    if len(record.step_samples_ms) < record.protocol.min_steps:
        return f"it has {len(record.step_samples_ms)} steps, fewer than {record.protocol.min_steps}"
    if summarize(record.step_samples_ms).median_ms != record.step.median_ms:
        return f"step_median_ms is {record.step.median_ms}, which is not the median of its samples"
    name = record.configuration.architecture
    if is_prefixed(name):
        try:
            content_of(name)
        except InputError as error:
            return str(error)
    else:
        try:
            native_input_size(name)
        except UnknownArchitectureError:
            return f"timm knows no architecture {name[:60]!r}"
    return None
