"""JSON values of campaigns, labels and snapshots for the page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

import numpy as np

from trappm.extensions.web.problems import without_home
from trappm.label_store import column_names, records
from trappm.learner.snapshots.manifest import Manifest, read_manifest
from trappm.prediction.selection import DEFAULT_SNAPSHOT, SHIPPED, local_registry
from trappm.profiler.errors import InputError
from trappm.profiler.models.families import family_of
from trappm.profiler.records import (
    METRICS,
    Execution,
    MemoryFormat,
    Optimizer,
    Outcome,
    Phase,
    Precision,
    Provenance,
)
from trappm.reports.campaign_facts import campaign_facts, campaign_rows
from trappm.snapshots import head_rows, list_snapshots
from trappm.store import LabelFilter, Store

PACE_ATTEMPTS = 20_000
"""Number of latest attempts in the pace."""
BINS = 40
"""Largest number of time intervals in the pace."""
MAX_EVENTS = 50
MAX_POINTS = 2_000
"""Largest number of points in the plot of predicted against measured."""
COUNTED = 100_000
"""Limit of the count of labels; the page shows that there are more."""
MAX_IN_FILE = 100_000
MAX_SAMPLES = 5_000
MAX_ATTEMPTS = 100


def campaigns(store: Store) -> list[dict[str, Any]]:
    """Return one row per campaign, the latest first."""
    return [asdict(row) for row in campaign_rows(store)]


def campaign(store: Store, campaign_id: str) -> dict[str, Any]:
    """Return the page's values of one campaign.

    Raises:
        InputError: The campaign does not exist.
    """
    known = campaign_facts(store, campaign_id, latest_events=MAX_EVENTS)
    shown = known.to_json()
    for name in ("spec", "assignments"):
        del shown[name]
    reports = [(r, report.to_json()) for r, report in known.trained]
    return shown | {
        "strategy": known.spec.get("strategy"),
        "learner": known.spec.get("learner"),
        "protocol": _name_of(known.spec.get("protocol")),
        "targets": (known.spec.get("stop") or {}).get("target_mape") or {},
        "rounds": [
            {"number": r.number, "purpose": str(r.purpose), "is_closed": r.is_closed}
            for r in known.rounds
        ],
        "errors": [
            {
                "round": r.number,
                "purpose": str(r.purpose),
                "labels": report["labels"],
                "devices": report["devices"],
            }
            for r, report in reports
        ],
        "transfer": reports[-1][1]["transfer"] if reports else {},
        "predicted": reports[-1][1]["evaluation"][:MAX_POINTS] if reports else [],
        "pace": _pace(store, campaign_id),
        "events": [
            {"at": e.at, "kind": e.kind, "message": e.message.get("message", "")}
            for e in reversed(known.events)
        ],
    }


def _name_of(protocol: object) -> str | None:
    """Return the name of a protocol, which may be defined in the campaign file itself."""
    if isinstance(protocol, Mapping):
        return str(protocol.get("name", "its own"))
    return None if protocol is None else str(protocol)


def _pace(store: Store, campaign_id: str) -> dict[str, Any]:
    """Return successful attempts per minute by device during the campaign."""
    frame = store.labels.query(
        LabelFilter(outcome="any", campaign=campaign_id),
        columns=["device", "outcome", "started_at"],
        sort="-started_at",
        limit=PACE_ATTEMPTS,
    )
    good = frame[frame["outcome"].isin(["ok", "oom"])]
    times: Sequence[datetime] = [t.to_pydatetime() for t in good["started_at"]]
    if len(times) < 2 or max(times) == min(times):
        return {"minutes_each": None, "series": {}, "began_at": None}
    first, last = min(times), max(times)
    width = max((last - first) / BINS, timedelta(seconds=30))
    counts: Counter[tuple[str, int]] = Counter(
        (device, int((time - first) / width))
        for device, time in zip(good["device"], times, strict=True)
    )
    bins = int((last - first) / width) + 1
    minutes = width.total_seconds() / 60
    return {
        "began_at": first.isoformat(),
        "minutes_each": minutes,
        "series": {
            device: [counts[device, number] / minutes for number in range(bins)]
            for device in sorted(set(good["device"]))
        },
    }


def labels(
    store: Store, wanted: LabelFilter, *, sort: str, columns: str | None, page: int, size: int
) -> dict[str, Any]:
    """Return one page of a table of labels, with their ids and the named columns, or all.

    Returns:
        rows (by column), total, more_than_total (true if the count is limited), page, size.

    Raises:
        InputError: Unknown column or name.
    """
    total = store.labels.count(wanted, at_most=COUNTED + 1)
    named = column_names(columns)
    frame = store.labels.query(
        wanted,
        columns=named and [*dict.fromkeys(["id", *named])],
        sort=sort,
        limit=size,
        offset=(page - 1) * size,
    )
    return {
        "rows": json.loads(json.dumps(list(records(frame)), default=str)),
        "total": min(total, COUNTED),
        "more_than_total": total > COUNTED,
        "page": page,
        "size": size,
    }


def label_names(store: Store) -> dict[str, Any]:
    """Return the options of the filter form's fields."""
    known = store.labels.names()
    return {
        **known,
        "precision": list(Precision),
        "memory_format": list(MemoryFormat),
        "optimizer": list(Optimizer),
        "phase": list(Phase),
        "execution": list(Execution),
        "provenance": list(Provenance),
        "outcome": [*Outcome, "any"],
        "metric": [*METRICS, "energy_j"],
        "campaign": [c.id for c in store.campaigns.all()],
    }


def label(store: Store, label_id: int) -> dict[str, Any]:
    """Return a label with its samples, attempts and environment.

    Raises:
        InputError: The label does not exist.
    """
    row = store.labels.get(label_id)
    measurement = store.measurements.get(row.measurement_id)
    attempts = store.labels.attempts(label_id).tail(MAX_ATTEMPTS)
    fields = measurement.to_dict()
    samples = list(measurement.step_samples_ms)
    fields.pop("configuration", None)
    fields["step_samples_ms"] = samples[:MAX_SAMPLES]
    details = {
        **asdict(row),
        "configuration": row.configuration.to_dict(),
        "title": str(row.configuration),
        "measurement": fields,
        "samples": len(samples),
        "attempts": list(records(attempts)),
    }
    return dict(json.loads(json.dumps(details, default=str)))


def labels_file(
    store: Store, wanted: LabelFilter, *, sort: str, columns: str | None, kind: str
) -> str:
    """Return the labels that match the filter as CSV or as a JSON list.

    Raises:
        InputError: More than `MAX_IN_FILE` labels match.
    """
    frame = store.labels.query(
        wanted, columns=column_names(columns), sort=sort, limit=MAX_IN_FILE + 1
    )
    if len(frame) > MAX_IN_FILE:
        raise InputError(
            f"more than {MAX_IN_FILE:,} labels match the filter; narrow it, or use: "
            "trappm labels export labels.parquet"
        )
    if kind == "csv":
        return str(frame.to_csv(index=False, date_format="%Y-%m-%dT%H:%M:%S.%f%z"))
    return json.dumps(list(records(frame)), default=str)


def snapshots() -> list[dict[str, Any]]:
    """Return one row per snapshot, the latest first, the shipped one last."""
    rows = list_snapshots(local_registry(), with_shipped=True)
    return [asdict(row) | {"damage": row.damage and without_home(row.damage)} for row in rows]


def snapshot(store: Store, name: str) -> dict[str, Any]:
    """Return a snapshot's manifest, aliases and errors.

    Args:
        store: Label store with the campaign's errors by family.
        name: Id or its prefix, alias, or `default`.

    Raises:
        SnapshotError: The snapshot does not exist or is damaged.
    """
    manifest = _manifest(name)
    aliases = {row["id"]: row["aliases"] for row in snapshots()}
    return {
        "id": manifest.id,
        "aliases": aliases.get(manifest.id, []),
        "manifest": manifest.to_json(),
        "heads": head_rows(manifest),
        "families": _families(store, manifest),
    }


def _manifest(name: str) -> Manifest:
    """Return a manifest of this machine's registry or the shipped one, never of a folder."""
    shipped = read_manifest(SHIPPED)
    if name in {DEFAULT_SNAPSHOT, shipped.id}:
        return shipped
    registry = local_registry()
    return registry.manifest(registry.resolve(name))


def _families(store: Store, manifest: Manifest) -> list[dict[str, Any]]:
    """Return errors by device, phase, metric and family with count and MAPE.

    They come from the manifest, or else from the report of its campaign.
    """
    rows = []
    for device, phases in (manifest.errors or {}).items():
        for phase, metrics in phases.items():
            for metric, judged in metrics.items():
                for family, errors in (judged.by_family or {}).items():
                    place = {"device": device, "phase": phase, "metric": metric}
                    numbers = {name: errors.get(name) for name in ("count", "mape")}
                    rows.append({**place, "family": family, **numbers})
    return rows or _of_campaign(store, manifest.campaign)


def _of_campaign(store: Store, campaign_id: str | None) -> list[dict[str, Any]]:
    """Return errors by family of the evaluation set in the last report of a campaign."""
    if campaign_id not in {campaign.id for campaign in store.campaigns.all()}:
        return []
    reports = [r.report for r in store.rounds.all(str(campaign_id)) if r.report]
    errors: dict[tuple[str, str, str], list[float]] = {}
    for row in reports[-1]["evaluation"] if reports else []:
        place = row["device"], row["metric"], family_of(row["architecture"])
        errors.setdefault(place, []).append(100 * abs(row["predicted"] / row["measured"] - 1))
    return [
        {
            "device": device,
            "phase": None,
            "metric": metric,
            "family": family,
            "count": len(gaps),
            "mape": float(np.mean(gaps)),
        }
        for (device, metric, family), gaps in sorted(errors.items())
    ]
