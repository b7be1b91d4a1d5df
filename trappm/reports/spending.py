"""What a campaign's measurements cost so far, and what the rest will: GPU-hours and money."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trappm.store import CampaignRecord, Store


def cost_so_far(store: Store, campaign: CampaignRecord) -> dict[str, Any]:
    """What was spent on measurements, failed attempts included, and what is to come.

    Returns:
        gpu_hours, gpu_hours_to_come (None while no attempt has ended on a device that is to measure
        more), money, money_to_come (None without `stop.price_per_gpu_hour` in the campaign file).
    """
    spent_s = store.campaigns.measuring_seconds_by_device(campaign.id)
    attempts = {d: sum(n.values()) for d, n in store.campaigns.outcome_counts(campaign.id).items()}
    ended = campaign.state in {"finished", "cancelled"}
    left = {} if ended else {d: n for d, n in _left(store, campaign).items() if n}
    to_come = None
    if all(attempts.get(device) for device in left):
        to_come = sum(n * spent_s[device] / attempts[device] for device, n in left.items()) / 3600
    price = (campaign.spec.get("stop") or {}).get("price_per_gpu_hour")
    hours = sum(spent_s.values()) / 3600
    return {
        "gpu_hours": hours,
        "gpu_hours_to_come": to_come,
        "money": None if price is None else price * hours,
        "money_to_come": None if price is None or to_come is None else price * to_come,
    }


def cost_line(cost: dict[str, Any]) -> str:
    """One line for people."""
    line = f"spent on measuring: {cost['gpu_hours']:,.2f} GPU-hours"
    if cost["money"] is not None:
        line += f" (money: {cost['money']:,.2f})"
    if cost["gpu_hours_to_come"] is None:
        return line
    line += f"; to come at most: about {cost['gpu_hours_to_come']:,.2f} GPU-hours"
    if cost["money_to_come"] is not None:
        line += f" (money: {cost['money_to_come']:,.2f})"
    return line


def _left(store: Store, campaign: CampaignRecord) -> dict[str, int]:
    """By device: how many configurations of the budget have not ended."""
    spec, counts = campaign.spec, store.assignments.counts(campaign.id)
    left = {}
    for kind in ("source", "target"):  # reading the whole file brings in torch, and this is quick
        device = spec["devices"].get(kind)
        if device is not None:
            budget = spec["evaluation"][kind] + spec["initial"][kind]
            budget += spec["rounds"]["count"] * spec["rounds"][kind]
            states = {str(state): count for state, count in counts.get(device, {}).items()}
            left[device] = max(0, budget - states.get("done", 0) - states.get("failed", 0))
    return left
