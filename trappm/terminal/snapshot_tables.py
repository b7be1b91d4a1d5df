"""Tables of snapshots, of one snapshot, and of an alias for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trappm.profiler.records import Phase
from trappm.snapshots import SnapshotListing, labels_by_provenance
from trappm.terminal.tables import console, print_line, print_table

if TYPE_CHECKING:
    from trappm.learner.snapshots.manifest_fields import Manifest
    from trappm.learner.snapshots.registry import AliasEntry


@dataclass(frozen=True)
class HeadErrors:
    """A metric of a head with its errors in percent; None if unknown."""

    device: str
    phase: str
    metric: str
    labels: int
    count: float | None
    mape: float | None
    median_ape: float | None
    coverage: float | None
    within_10_percent: float | None
    rmse: float | None
    """In the metric's unit."""


def print_snapshots(rows: Sequence[SnapshotListing]) -> None:
    """Print the snapshots of a registry."""
    shown = [
        (
            row.id,
            ", ".join(row.aliases),
            row.campaign,
            ", ".join(row.devices or ()),
            ", ".join(f"{n:,} {name}" for name, n in (row.training_labels or {}).items()),
            row.damage or _minute(row.created_at),
        )
        for row in rows
    ]
    print_table("snapshots", ("id", "aliases", "campaign", "devices", "labels", "made"), shown)


def print_manifest(manifest: Manifest) -> None:
    """Print the heads with their errors, the labels, versions and sources of a snapshot."""
    shown = ("device", "phase", "metric", "labels", "mape", "median_ape", "coverage")
    rows = [tuple(getattr(row, name) for name in shown) for row in head_rows(manifest)]
    out = console()
    out.print(f"snapshot [bold]{manifest.id}[/], made {manifest.created_at}")
    columns = ("device", "phase", "metric", "labels", "MAPE, %", "median, %", "in interval, %")
    print_table("", columns, rows)
    lines = {
        "errors on": manifest.split,
        "campaign": manifest.campaign,
        "parent": manifest.parent,
        "labels": f"{_provenances(manifest)}, {manifest.training_labels.sha256[:16]}",
        "features": ", ".join(f"{k} {v}" for k, v in manifest.feature_schema.items()),
        "versions": ", ".join(f"{k} {v}" for k, v in manifest.versions.items()),
    }
    for name, value in lines.items():
        if value is not None:
            print_line(f"{name}: {value}")
    files = {x.file: x.source.partition(",")[0] for x in reversed(manifest.sources)}
    if files:  # once per file; --json has the counts per head
        print_table("learned from", ("file", "source"), sorted(files.items()))


def print_alias(alias: str, history: Sequence[AliasEntry]) -> None:
    """Print the snapshots that an alias meant, the latest first."""
    rows = [(entry.snapshot, _minute(entry.at), entry.why) for entry in reversed(history)]
    print_table(f"history of {alias}", ("snapshot", "since", "reason"), rows)


def head_rows(manifest: Manifest) -> list[HeadErrors]:
    """Return one row per device, phase and metric of a snapshot."""
    rows = []
    for device, phases in manifest.heads.items():
        errors = manifest.errors_by_phase(device)
        for phase, head in phases.items():
            by_metric = errors.get(phase) or errors.get(None, {})
            for metric in head.metrics:
                known = by_metric.get(metric)
                rows.append(
                    HeadErrors(
                        device,
                        phase,
                        metric,
                        _label_count(manifest, device, phase, metric) or head.label_count,
                        **{name: known.number(name) if known else None for name in _NUMBERS},
                    )
                )
    return rows


def _label_count(manifest: Manifest, device: str, phase: Phase, metric: str) -> int:
    """Return the number of labels of a metric by the sources, or 0 if they have none."""
    head = {"device": device, "phase": phase.value, "metric": metric}
    return sum(
        source["labels"]
        for source in manifest.to_json().get("sources", [])
        if all(source.get(name) == value for name, value in head.items())
    )


_NUMBERS = ("count", "mape", "median_ape", "coverage", "within_10_percent", "rmse")


def _minute(moment: object) -> str:
    return str(moment)[:16].replace("T", " ")


def _provenances(manifest: Manifest) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in labels_by_provenance(manifest).items())
