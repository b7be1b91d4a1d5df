"""The end of a campaign: a snapshot of what it learned, or the reason why there is none.

An order to stop may come until the last moment. So the files are written first, which nobody sees;
then the store ends the campaign and registers them, unless it was stopped; then names are moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trappm.cluster.campaign.learner_thread import LearnerThread, training_labels
from trappm.cluster.campaign.news import CampaignStopped, News
from trappm.cluster.workers.rehearsal import unfit_to_publish
from trappm.profiler.errors import TrappmError
from trappm.profiler.host.environment import utc_now
from trappm.store import SnapshotRecord, Store


def publish(
    store: Store,
    learner: LearnerThread,
    news: News,
    campaign_id: str,
    snapshots: Path,
    errors: Mapping[str, Any],
) -> str | None:
    """Finishes a campaign: publishes the heads with these errors, the latest unless they regressed.

    Returns:
        The snapshot's id; None if its labels are of no hardware.

    Raises:
        CampaignStopped: it was paused or cancelled meanwhile; no name was moved.
        TrappmError: the learner or the store failed, before the campaign was finished.
    """
    labels = training_labels(store, campaign_id).labels
    unfit = unfit_to_publish(labels) if errors else "there are too few labels to learn from"
    if unfit:
        news.tell(news=f"no snapshot is published: {unfit}")
        _finish(store, campaign_id, f"no snapshot: {unfit}", None)
        return None
    news.tell("publishing", total=0)
    published = learner.publish(snapshots, campaign_id, labels, errors)
    snapshot = SnapshotRecord(
        id=published.id,
        campaign_id=campaign_id,
        location=published.folder,
        manifest=published.manifest,
        created_at=utc_now(),
    )
    _finish(store, campaign_id, f"snapshot {snapshot.id}", snapshot)
    for note in published.notes:
        news.tell(news=note)
        store.campaigns.log_event(campaign_id, "published", {"message": note})
    try:
        kept = learner.promote(snapshots, snapshot.id)
    except TrappmError as error:  # the campaign is finished all the same
        kept = (
            f"snapshot {snapshot.id} is published, but not the latest ({error}); "
            f"name it with: trappm snapshot alias latest {snapshot.id}"
        )
        store.campaigns.log_event(campaign_id, "published", {"message": kept})
    if kept is not None:
        news.tell(news=kept)
    return snapshot.id


def _finish(store: Store, campaign_id: str, message: str, snapshot: SnapshotRecord | None) -> None:
    if not store.owners.finish_campaign(campaign_id, message, snapshot):
        raise CampaignStopped
