"""Orders to a campaign from any shell that reaches its label store: pause, cancel, try again.

A campaign that runs, on whichever node, looks at its state in the store once a second, and stops
when that does not say that it is running.
"""

from __future__ import annotations

from collections.abc import Sequence

from trappm.cluster.campaign.history import rule_held
from trappm.profiler.errors import InputError
from trappm.profiler.records import Outcome
from trappm.store import CampaignRecord, CampaignState, Store

LOST = "lost"
"""Instead of an outcome: no attempt came to an end."""

RETRIED = (Outcome.UNSTABLE, Outcome.ERROR, LOST)
"""Outcomes that are retried by default. Others, such as oom, would be the same again."""


def order_stop(store: Store, campaign_id: str | None, state: CampaignState) -> CampaignRecord:
    """Has a campaign paused or cancelled; what is being measured is given up.

    Args:
        campaign_id: None: the one that runs, or the latest where none does.

    Raises:
        InputError: there is no such campaign, or it has ended; or several run, and none is named.
    """
    campaign = store.campaigns.get(campaign_id or _running(store))
    store.owners.stop_campaign(campaign.id, state)
    return store.campaigns.get(campaign.id)


def order_retry(
    store: Store, campaign_id: str | None, outcomes: Sequence[str] = RETRIED
) -> tuple[CampaignRecord, int]:
    """Open assignments again that ended without a label.

    Args:
        store: Label store.
        campaign_id: None: the latest.
        outcomes: Only those whose last attempt ended so, or "lost": those that no attempt ended.

    Returns:
        The campaign, paused if it had finished, and how many assignments wait again.

    Raises:
        InputError: no such campaign or outcome; the campaign was cancelled, is running, or was
            ended by a stop rule, so that nothing more is measured for it.
    """
    for outcome in outcomes:
        if outcome not in {LOST, *Outcome} - {Outcome.OK}:
            known = ", ".join([*(str(o) for o in Outcome if o is not Outcome.OK), LOST])
            raise InputError(f"Unknown outcome {outcome!r}. Expected one of: {known}")
    campaign = store.campaigns.get(campaign_id)
    held = rule_held(store, campaign.id)
    if held is not None:
        raise InputError(
            f"campaign {campaign.id} was ended by its stop rule ({held.rule}: {held.reason}), and "
            "measures no more; launch it with another rule: its labels are taken over"
        )
    count = sum(
        store.assignments.reopen(campaign.id, None if outcome == LOST else Outcome(outcome))
        for outcome in outcomes
    )
    return store.campaigns.get(campaign.id), count


def _running(store: Store) -> str | None:
    running = [c.id for c in store.campaigns.all() if c.state is CampaignState.RUNNING]
    if len(running) > 1:
        raise InputError(f"{len(running)} campaigns run; name one of them: {', '.join(running)}")
    return running[0] if running else None
