"""The end of a campaign: a snapshot of what it learned, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trappm.cluster.rehearsal import unfit_to_publish
from trappm.cluster.telling import Teller
from trappm.cluster.thinking import Thinker, training_labels
from trappm.store import Store


@dataclass(frozen=True)
class Published:
    """What came of it."""

    snapshot_id: str | None
    """None if its labels are of no hardware."""
    told: str


def publish(
    store: Store,
    thinker: Thinker,
    teller: Teller,
    campaign_id: str,
    snapshots: Path,
    errors: dict[str, Any],
) -> Published:
    """Publishes the heads with these errors, and makes them the latest unless they regressed.

    Raises:
        TrappmError: the learner or the store failed.
    """
    labels = training_labels(store, campaign_id)
    unfit = unfit_to_publish(labels) if errors else "there are too few labels to learn from"
    if unfit:
        teller.tell(news=f"no snapshot is published: {unfit}")
        return Published(None, f"no snapshot: {unfit}")
    teller.tell("publishing", total=0)
    info = thinker.publish(snapshots, campaign_id, labels, errors)
    store.register_snapshot(
        info["id"], campaign_id=campaign_id, location=info["folder"], manifest=info["manifest"]
    )
    if info.get("promoted", True):
        store.set_alias("latest", info["id"])
    else:
        teller.tell(news=info["news"])
    return Published(str(info["id"]), f"snapshot {info['id']}")
