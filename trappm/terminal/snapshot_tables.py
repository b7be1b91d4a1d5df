"""Snapshots on the terminal: lists, what one holds, and what two differ in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from trappm.learner.snapshots.manifest import read_manifest
from trappm.learner.snapshots.regressions import mean_errors
from trappm.prediction.snapshot_choice import DEFAULT, SHIPPED
from trappm.profiler.errors import SnapshotError
from trappm.profiler.number_text import number_text
from trappm.profiler.records import Phase
from trappm.terminal.tables import console, print_line, print_table

if TYPE_CHECKING:
    from trappm.learner.snapshots.manifest_fields import Manifest
    from trappm.learner.snapshots.registry import Registry


@dataclass(frozen=True)
class SnapshotListing:
    """A snapshot in a list; of a damaged one only its id and names are known."""

    id: str
    aliases: list[str]
    campaign: str | None = None
    devices: list[str] | None = None
    training_labels: Mapping[str, int] | None = None
    """Counts by provenance."""
    created_at: str | None = None
    damage: str | None = None

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        return values if self.damage else {k: v for k, v in values.items() if k != "damage"}


@dataclass(frozen=True)
class HeadErrors:
    """A head of a snapshot, with its errors (in percent) where they are known."""

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


@dataclass(frozen=True)
class Difference:
    """Something that two manifests say differently; None where one lacks it."""

    what: str
    first: object
    second: object


def snapshot_rows(registry: Registry, *, shipped: bool) -> list[SnapshotListing]:
    """One row for each whole snapshot, the latest first; the shipped one last."""
    aliases = registry.aliases()
    rows = []
    for name in registry.ids():
        called = sorted(alias for alias, meant in aliases.items() if meant == name)
        try:
            rows.append(_row(registry.manifest(name), called))
        except SnapshotError as error:
            rows.append(SnapshotListing(name, called, damage=str(error)))
    rows.sort(key=lambda row: str(row.created_at), reverse=True)
    if shipped:
        rows.append(_row(read_manifest(SHIPPED), [DEFAULT]))
    return rows


def print_snapshots(rows: Sequence[SnapshotListing]) -> None:
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
    """Heads with their errors, labels, and where it comes from."""
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
    if files:  # each once, though it teaches several heads; --json has the counts of each
        print_table("learned from", ("file", "source"), sorted(files.items()))


def head_rows(manifest: Manifest) -> list[HeadErrors]:
    """The heads of a snapshot with their errors, one row for each."""
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
    """Labels of this metric by what the sources tell; 0 where they do not."""
    head = {"device": device, "phase": phase.value, "metric": metric}
    return sum(
        source["labels"]
        for source in manifest.to_json().get("sources", [])
        if all(source.get(name) == value for name, value in head.items())
    )


def differences(first: Manifest, second: Manifest) -> list[Difference]:
    """What two manifests say differently."""
    sides = [_facts(manifest) for manifest in (first, second)]
    names = [*sides[0], *(name for name in sides[1] if name not in sides[0])]
    names.sort(key=lambda name: name.startswith(_VERSION))  # stand last
    return [
        Difference(name, sides[0].get(name), sides[1].get(name))
        for name in names
        if sides[0].get(name) != sides[1].get(name)
    ]


def print_differences(rows: Sequence[Difference]) -> None:
    if not rows:
        console().print("they are the same snapshot")
        return
    shown = [
        (row.what, _minute(row.first), _minute(row.second))
        if row.what == _MADE
        else (row.what, row.first, row.second)
        for row in rows
    ]
    print_table("", ("what", "first", "second"), shown)


_MADE, _VERSION = "made", "version of "
_NUMBERS = ("count", "mape", "median_ape", "coverage", "within_10_percent", "rmse")


def _row(manifest: Manifest, aliases: list[str]) -> SnapshotListing:
    return SnapshotListing(
        id=manifest.id,
        aliases=aliases,
        campaign=manifest.campaign,
        devices=sorted(manifest.heads),
        training_labels=_by_provenance(manifest),
        created_at=manifest.created_at,
    )


def _minute(moment: object) -> str:
    return str(moment)[:16].replace("T", " ")


def _facts(manifest: Manifest) -> dict[str, str | None]:
    facts = {
        "id": manifest.id,
        _MADE: manifest.created_at,
        "campaign": manifest.campaign,
        "labels": _provenances(manifest),
        "label set": manifest.training_labels.sha256[:16],
        "source device": manifest.source_device,
        "features": ", ".join(f"{k} {v}" for k, v in manifest.feature_schema.items()),
    }
    errors = mean_errors(manifest)
    for device, phases in manifest.heads.items():
        for phase, head in phases.items():
            for metric in head.metrics:
                error = errors.get((device, phase, metric))
                known = "error not known" if error is None else f"{number_text(error, 3)} % off"
                facts[f"head {device} {phase} {metric}"] = known
    return facts | {f"{_VERSION}{name}": v for name, v in manifest.versions.items()}


def _by_provenance(manifest: Manifest) -> dict[str, int]:
    total: Counter[str] = Counter()
    for counts in manifest.training_labels.counts.values():
        total.update(counts)
    return dict(total)


def _provenances(manifest: Manifest) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in _by_provenance(manifest).items())
