"""Import of measurements from files into the label store, one bad row refusing the whole file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from pathlib import Path

from trappm.profiler.errors import InputError
from trappm.store.exchange import in_training
from trappm.store.exchange.files import ImportReport, Tally, Verdict, read_file
from trappm.store.repositories.measurements import BATCH
from trappm.store.store import Store

_KNOWN = Verdict(kind="known", reason="recorded before")
_CONFLICT = Verdict(kind="rejected", reason="conflicts with what is there under its attempt key")


def import_file(store: Store, path: Path, *, source: str | None = None) -> ImportReport:
    """Import an export, the profiler's JSON lines, or a training's record.

    Args:
        store: Label store that receives the measurements.
        path: File in the documented format.
        source: `in-training` for records of training callbacks, otherwise None.

    Raises:
        InputError: The file, one of its rows or the source is invalid; nothing was recorded.
        StoreError: The store cannot be written; importing again completes it.
    """
    if source is None:
        return record_verdicts(store, path.name, "TraPPM", partial(read_file, path))
    if source != in_training.SOURCE:
        raise InputError(
            f"Unknown source {source!r}. Published sheets: python -m research import --help"
        )
    verdicts = in_training.verdicts(path)
    return record_verdicts(store, path.name, source, lambda: verdicts)


def record_verdicts(
    store: Store, name: str, source: str, read: Callable[[], Iterable[Verdict]]
) -> ImportReport:
    """Record the measurements of a file and count the rows that were rejected or known.

    Args:
        store: Label store that receives the measurements.
        name: File name in the report.
        source: Source name in the report.
        read: Returns the file's verdicts from the first row on; called twice.

    Raises:
        InputError: A row is invalid; nothing was recorded.
        StoreError: The store cannot be written; importing again completes it.
    """
    tally = Tally()
    verdicts = iter(read())
    while batch := [*islice(verdicts, BATCH)]:
        before = store.measurements.recorded_before(
            [v.measurement for v in batch if v.measurement is not None]
        )
        for verdict in batch:
            differs = None
            if verdict.measurement is not None:
                differs = before.get(verdict.measurement.attempt_key)
            tally.add(verdict if differs is None else _CONFLICT if differs else _KNOWN)
    new = store.measurements.record_many(v.measurement for v in read() if v.measurement is not None)
    return tally.report(name, source, new)
