"""What the page shows of snapshots: versions and their names, errors by head and by family."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from trappm.learner.snapshots.manifest import read_manifest
from trappm.prediction.snapshot_choice import DEFAULT, SHIPPED, local_registry
from trappm.profiler.models.families import family_of
from trappm.snapshots import head_rows, listings

if TYPE_CHECKING:
    from trappm.learner.snapshots.manifest_fields import Manifest
    from trappm.store import Store


def rows() -> list[dict[str, Any]]:
    """One row for each snapshot, the latest first, the shipped one last."""
    return [row.to_json() for row in listings(local_registry(), with_shipped=True)]


def facts(store: Store, name: str) -> dict[str, Any]:
    """A snapshot's manifest, what it is called, and its errors.

    Args:
        store: whose campaigns may have errors by family.
        name: an id, its beginning, an alias, or `default`.

    Raises:
        SnapshotError: there is none of that name, or it is damaged.
    """
    manifest = _manifest(name)
    called: list[str] = next((row["aliases"] for row in rows() if row["id"] == manifest.id), [])
    return {
        "id": manifest.id,
        "aliases": called,
        "manifest": manifest.to_json(),
        "heads": head_rows(manifest),
        "families": _families(store, manifest),
    }


def _manifest(name: str) -> Manifest:
    """Only of this machine's registry or the shipped one: a name is never a folder here."""
    shipped = read_manifest(SHIPPED)
    if name in {DEFAULT, shipped.id}:
        return shipped
    registry = local_registry()
    return registry.manifest(registry.resolve(name))


def _families(store: Store, manifest: Manifest) -> list[dict[str, Any]]:
    """Errors by family, from the manifest, or else from the report of its campaign.

    Returns:
        One row for each device, phase (None: any), metric and family: count, mape.
    """
    rows = []
    for device in manifest.errors or {}:
        for phase, metrics in manifest.errors_by_phase(device).items():
            for metric, judged in metrics.items():
                for family, errors in (judged.by_family or {}).items():
                    place = {"device": device, "phase": phase, "metric": metric}
                    numbers = {name: errors.get(name) for name in ("count", "mape")}
                    rows.append({**place, "family": family, **numbers})
    return rows or _of_campaign(store, manifest.campaign)


def _of_campaign(store: Store, campaign_id: str | None) -> list[dict[str, Any]]:
    """From what the last report of a campaign predicted for its evaluation set."""
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
