"""What steps took in somebody's training, as a callback recorded it (`trappm/integrations/`).

Nobody kept the machine quiet, so what is no such record is refused here, and such a record makes a
label by a protocol of its own, which heads do not learn from.
"""

from __future__ import annotations

from pathlib import Path

from trappm.profiler.errors import InputError, UnknownArchitectureError
from trappm.profiler.records import Measurement, Outcome, Provenance
from trappm.profiler.records.step_scope import IN_TRAINING, RECORDED
from trappm.profiler.steps.sampling import summarize
from trappm.profiler.transformers.names import content_of, is_transformer
from trappm.store.exchange.files import Verdict, checked_size, read_file

SOURCE = IN_TRAINING
MAX_FILE_BYTES = 64 << 20
"""Tens of thousands of trainings."""


def verdicts(path: Path) -> list[Verdict]:
    """What becomes of each line of a file.

    Raises:
        InputError: the file is too large, or a line of it is no such record; with its number.
    """
    if checked_size(path).stat().st_size > MAX_FILE_BYTES:
        raise InputError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB; give it in parts")
    known = list(read_file(path))
    for number, verdict in enumerate(known, 1):
        if verdict.measurement is not None and (why := _why_not(verdict.measurement)):
            raise InputError(f"{path.name}, row {number}: {why}; nothing was imported")
    if not known:
        raise InputError(f"{path} is empty; a callback writes it at the end of a training")
    return known


def _why_not(record: Measurement) -> str | None:
    """Why this is no record of a training; None if it is one."""
    from trappm.profiler.models.zoo import native_input_size

    environment = record.environment
    if (
        record.protocol.name != IN_TRAINING
        or record.provenance is not Provenance.IMPORTED
        or environment.get("source") != RECORDED
        or "measuring_version" in environment
    ):
        return "it was not recorded in training; measurements go in by trappm labels import"
    if record.outcome is not Outcome.OK or record.step is None:
        return f"its outcome is {record.outcome}; a training's record is of steps that ended"
    if len(record.step_samples_ms) < record.protocol.min_steps:
        return f"it has {len(record.step_samples_ms)} steps, fewer than {record.protocol.min_steps}"
    if summarize(record.step_samples_ms).median_ms != record.step.median_ms:
        return f"step_median_ms is {record.step.median_ms}, which is not the median of its samples"
    name = record.configuration.architecture
    if is_transformer(name):
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
