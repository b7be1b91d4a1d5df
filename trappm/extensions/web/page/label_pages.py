"""What the page shows of labels: one page of a table, one label, and the whole as a file."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from trappm.label_store import records
from trappm.profiler.errors import InputError
from trappm.profiler.records import (
    METRICS,
    MemoryFormat,
    Optimizer,
    Outcome,
    Phase,
    Precision,
    Provenance,
)

if TYPE_CHECKING:
    from trappm.store import LabelFilter, Store

LARGEST_PAGE = 200
COUNTED = 100_000
"""Counting ends here; the page then shows that there are more."""
MOST_IN_FILE = 100_000
MOST_SAMPLES = 5_000
MOST_ATTEMPTS = 100


def page(store: Store, wanted: LabelFilter, *, sort: str, page: int, size: int) -> dict[str, Any]:
    """One page of a table of labels.

    Returns:
        rows (by column), total, more_than_total (whether counting ended there), page, size.

    Raises:
        InputError: a column or name that there is not.
    """
    total = store.labels.count(wanted, at_most=COUNTED + 1)
    frame = store.labels.query(wanted, sort=sort, limit=size, offset=(page - 1) * size)
    return {
        "rows": json.loads(json.dumps(list(records(frame)), default=str)),
        "total": min(total, COUNTED),
        "more_than_total": total > COUNTED,
        "page": page,
        "size": size,
    }


def names(store: Store) -> dict[str, Any]:
    """What the form's fields offer."""
    known = store.labels.names()
    return {
        **known,
        "precision": list(Precision),
        "memory_format": list(MemoryFormat),
        "optimizer": list(Optimizer),
        "phase": list(Phase),
        "provenance": list(Provenance),
        "outcome": [*Outcome, "any"],
        "metric": [*METRICS, "energy_j"],
        "campaign": [c.id for c in store.campaigns.all()],
    }


def label_details(store: Store, label_id: int) -> dict[str, Any]:
    """Everything behind one label.

    Raises:
        InputError: there is none of this id.
    """
    label = store.labels.get(label_id)
    measurement = store.measurements.get(label.measurement_id)
    attempts = store.labels.attempts(label_id).tail(MOST_ATTEMPTS)
    fields = measurement.to_dict()
    samples = list(measurement.step_samples_ms)
    fields.pop("configuration", None)
    fields["step_samples_ms"] = samples[:MOST_SAMPLES]
    details = {
        **asdict(label),
        "configuration": label.configuration.to_dict(),
        "title": str(label.configuration),
        "measurement": fields,
        "samples": len(samples),
        "attempts": list(records(attempts)),
    }
    return dict(json.loads(json.dumps(details, default=str)))


def as_file(store: Store, wanted: LabelFilter, *, sort: str, kind: str) -> str:
    """The labels that pass, as CSV or as a JSON list.

    Raises:
        InputError: there are more than a page can hand out; with the command for that.
    """
    frame = store.labels.query(wanted, sort=sort, limit=MOST_IN_FILE + 1)
    if len(frame) > MOST_IN_FILE:
        raise InputError(
            f"more than {MOST_IN_FILE:,} labels pass the filter; narrow it, or use: "
            "trappm labels export labels.parquet"
        )
    if kind == "csv":
        return str(frame.to_csv(index=False, date_format="%Y-%m-%dT%H:%M:%S.%f%z"))
    return json.dumps(list(records(frame)), default=str)
