"""Snapshots on the terminal: lists, what one holds, and what two differ in."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from trappm.learner.snapshots.manifest import read_manifest
from trappm.learner.snapshots.regressions import mean_errors
from trappm.prediction.snapshot_choice import DEFAULT, SHIPPED
from trappm.profiler.errors import SnapshotError
from trappm.terminal.tables import console, print_table

if TYPE_CHECKING:
    from trappm.learner.snapshots.manifest_fields import Manifest
    from trappm.learner.snapshots.registry import Registry


def snapshot_rows(registry: Registry, *, shipped: bool) -> list[dict[str, Any]]:
    """One row for each whole snapshot, the latest first; the shipped one last."""
    aliases = registry.aliases()
    rows = []
    for name in registry.ids():
        called = sorted(alias for alias, meant in aliases.items() if meant == name)
        try:
            rows.append(_row(registry.manifest(name), called))
        except SnapshotError as error:
            rows.append({**dict.fromkeys(_COLUMNS), "id": name, "aliases": called,
                         "damage": str(error)})  # fmt: skip
    rows.sort(key=lambda row: str(row["created_at"]), reverse=True)
    if shipped:
        rows.append(_row(read_manifest(SHIPPED), [DEFAULT]))
    return rows


def print_snapshots(rows: list[dict[str, Any]]) -> None:
    shown = [
        (
            row["id"],
            ", ".join(row["aliases"]),
            row["campaign"],
            ", ".join(row["devices"] or ()),
            ", ".join(f"{n} {name}" for name, n in (row["training_labels"] or {}).items()),
            row.get("damage") or str(row["created_at"])[:16].replace("T", " "),
        )
        for row in rows
    ]
    print_table("snapshots", ("id", "aliases", "campaign", "devices", "labels", "made"), shown)


def print_manifest(manifest: Manifest) -> None:
    """Heads with their errors, labels, and where it comes from."""
    shown = ("device", "phase", "metric", "labels", "mape", "median_ape", "coverage")
    rows = [tuple(row[name] for name in shown) for row in head_rows(manifest)]
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
            out.print(f"{name}: {value}", soft_wrap=True, markup=False)
    for source in manifest.sources:
        out.print(
            f"{source.labels} labels from {source.file} ({source.source})",
            soft_wrap=True,
            markup=False,
        )


def head_rows(manifest: Manifest) -> list[dict[str, Any]]:
    """One row for each head: device, phase, metric, labels, and its errors where they are known."""
    rows = []
    for device, phases in manifest.heads.items():
        errors = manifest.errors_by_phase(device)
        for phase, head in phases.items():
            by_metric = errors.get(phase) or errors.get(None, {})
            for metric in head.metrics:
                known = by_metric.get(metric)
                rows.append(
                    {
                        "device": device,
                        "phase": phase,
                        "metric": metric,
                        "labels": head.label_count,
                        **{name: known.number(name) if known else None for name in _NUMBERS},
                    }
                )
    return rows


def differences(first: Manifest, second: Manifest) -> list[dict[str, Any]]:
    """What two manifests say differently: one row each, missing values None."""
    sides = [_facts(manifest) for manifest in (first, second)]
    names = [*sides[0], *(name for name in sides[1] if name not in sides[0])]
    return [
        {"what": name, "first": sides[0].get(name), "second": sides[1].get(name)}
        for name in names
        if sides[0].get(name) != sides[1].get(name)
    ]


def print_differences(rows: list[dict[str, Any]]) -> None:
    if not rows:
        console().print("they are the same snapshot")
        return
    print_table("", ("what", "first", "second"), [list(row.values()) for row in rows])


_NUMBERS = ("count", "mape", "median_ape", "coverage", "within_10_percent", "rmse")
_COLUMNS = ("id", "aliases", "campaign", "devices", "training_labels", "created_at")


def _row(manifest: Manifest, aliases: list[str]) -> dict[str, Any]:
    return {
        "id": manifest.id,
        "aliases": aliases,
        "campaign": manifest.campaign,
        "devices": sorted(manifest.heads),
        "training_labels": _by_provenance(manifest),
        "created_at": manifest.created_at,
    }


def _facts(manifest: Manifest) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "id": manifest.id,
        "made": manifest.created_at,
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
                known = "error not told" if error is None else f"{error:.3g} % off"
                facts[f"head {device} {phase} {metric}"] = known
    return facts | {f"version of {name}": v for name, v in manifest.versions.items()}


def _by_provenance(manifest: Manifest) -> dict[str, int]:
    total: Counter[str] = Counter()
    for counts in manifest.training_labels.counts.values():
        total.update(counts)
    return dict(total)


def _provenances(manifest: Manifest) -> str:
    return ", ".join(f"{count} {name}" for name, count in _by_provenance(manifest).items())
