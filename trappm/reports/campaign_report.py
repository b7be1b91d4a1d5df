"""What a campaign found, gathered from the store as plain values and shown as tables and plots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from trappm.profiler.records import METRICS
from trappm.reports.spending import cost_line, cost_so_far
from trappm.terminal.tables import console, scatter, table

if TYPE_CHECKING:
    from trappm.profiler.measuring.canary import CanaryReading
    from trappm.store import CampaignRecord, Store

MINIMUM_FOR_A_PLOT = 3
LATEST_READINGS = 20
_BARS = "▁▂▃▄▅▆▇█"


def campaign_rows(store: Store) -> list[dict[str, Any]]:
    labels = store.campaigns.label_counts()
    return [
        {
            "id": campaign.id,
            "name": campaign.name,
            "state": campaign_state(campaign),
            "labels": labels.get(campaign.id, 0),
            "seed": campaign.seed,
            "created_at": campaign.created_at,
            "finished_at": campaign.finished_at,
        }
        for campaign in store.campaigns.all()
    ]


def print_campaigns(rows: list[dict[str, Any]]) -> None:
    if not rows:
        console().print("no campaign yet; start one with: trappm campaign launch --preset laptop")
        return
    console().print(table("campaigns", list(rows[0]), [list(_short(row).values()) for row in rows]))


def campaign_facts(store: Store, campaign_id: str) -> dict[str, Any]:
    """Everything that status and report show, as plain values."""
    from trappm.cluster.campaign.stop_check import end_of
    from trappm.cluster.workers.rehearsal import runs_nothing

    campaign = store.campaigns.get(campaign_id)
    devices = dict(campaign.spec.get("devices") or {})
    snapshots = [s for s in store.snapshots.all() if s.campaign_id == campaign_id]
    return {
        "id": campaign.id,
        "name": campaign.name,
        "state": campaign_state(campaign),
        "seed": campaign.seed,
        "spec": campaign.spec,
        "assignments": store.assignments.counts(campaign_id),
        "outcomes": store.campaigns.outcome_counts(campaign_id),
        "rounds": [
            {"number": r.number, "purpose": r.purpose, "state": r.state, "report": r.report or {}}
            for r in store.rounds.all(campaign_id)
        ],
        "canary": canary_rows(store.canaries.all(campaign_id=campaign_id)),
        "rehearsal_on": [d for d in devices.values() if d and runs_nothing(d)],
        "snapshot": snapshots[0].id if snapshots else None,
        "end": end_of(store, campaign),
        "cost": cost_so_far(store, campaign),
        "events": [
            {"at": e.at, "kind": e.kind, "message": e.message}
            for e in store.campaigns.events(campaign_id, last=5)
        ],
    }


def canary_rows(readings: Iterable[CanaryReading]) -> list[dict[str, Any]]:
    """What the canary said of each worker: one row for each series of comparable readings."""
    series: dict[tuple[object, ...], list[CanaryReading]] = {}
    for reading in readings:
        series.setdefault(reading.series, []).append(reading)
    return [
        {
            "device": last.device,
            "host": last.host,
            "stack_fingerprint": last.stack_fingerprint,
            "canary": str(last.configuration),
            "readings": len(taken),
            "step_times_ms": [reading.step_time_ms for reading in taken],
            "reference_ms": last.reference_ms,
            "last_ms": last.step_time_ms,
            "last_drift": last.relative_drift,
            "decision": str(last.decision),
            "taken_at": last.taken_at,
            "message": last.message,
        }
        for taken in series.values()
        for last in taken[-1:]
    ]


def campaign_state(campaign: CampaignRecord) -> str:
    """Its state; one that says it is running, but whose process is gone, was interrupted."""
    from trappm.cluster.campaign.ownership import runs

    if campaign.state == "running" and not runs(campaign):
        return f"interrupted; go on with: trappm campaign resume {campaign.id}"
    return str(campaign.state)


def print_status(facts: dict[str, Any]) -> None:
    out = console()
    out.print(f"campaign [bold]{facts['id']}[/] ({facts['name']}): {facts['state']}")
    _print_assignments(facts)
    _print_outcomes(facts)
    _print_canary(facts)
    _print_rounds(facts)
    console().print(cost_line(facts["cost"]), soft_wrap=True, markup=False)
    _print_end(facts)
    for event in facts["events"]:
        at, message = event["at"][:19].replace("T", " "), event["message"].get("message", "")
        out.print(f"{at} UTC  {event['kind']}: {message}", soft_wrap=True)


def print_report(facts: dict[str, Any]) -> None:
    out = console()
    out.print(f"\ncampaign [bold]{facts['id']}[/] ({facts['name']}): {facts['state']}")
    _print_assignments(facts)
    _print_outcomes(facts)
    _print_canary(facts)
    _print_rounds(facts)
    learned = [r["report"] for r in facts["rounds"] if r["report"]]
    if learned:
        _print_left_out(learned[-1])
        _print_transfer(learned[-1])
        _print_scatter(learned[-1])
    if facts["rehearsal_on"]:
        names = ", ".join(facts["rehearsal_on"])
        out.print(
            f"\nA rehearsal: {names} runs nothing, so what is told here was not measured on such a "
            "device, and no snapshot is published.",
            soft_wrap=True,
        )
    if facts["snapshot"]:
        out.print("\nNext:")
        out.print(f"  trappm labels query --device {facts['spec']['devices']['source']} --limit 10")
        out.print("  trappm snapshot pull --to my-snapshot")
        out.print("  trappm predict resnet18 --batch-size 4 --input-size 96")


def _print_assignments(facts: dict[str, Any]) -> None:
    states = ("open", "leased", "done", "failed")
    rows = [(d, *(n.get(s, 0) for s in states)) for d, n in facts["assignments"].items()]
    console().print(table("assignments", ("device", *states), rows))


def _print_outcomes(facts: dict[str, Any]) -> None:
    rows = [
        (device, outcome, count)
        for device, counts in facts["outcomes"].items()
        for outcome, count in counts.items()
    ]
    console().print(table("attempts by outcome", ("device", "outcome", "count"), rows))


def _print_canary(facts: dict[str, Any]) -> None:
    if not facts["canary"]:
        return
    rows = [
        (
            row["device"],
            row["host"],
            row["readings"],
            sparkline(row["step_times_ms"]),
            row["reference_ms"],
            row["last_ms"],
            None if row["last_drift"] is None else 100 * row["last_drift"],
            row["decision"],
        )
        for row in facts["canary"]
    ]
    columns = (
        "device", "host", "readings", "step times", "reference, ms", "last, ms", "drift, %",
        "decision",
    )  # fmt: skip
    console().print(table("canary: is each device still itself?", columns, rows))
    for row in facts["canary"]:
        if row["message"]:
            console().print(f"{row['device']}: {row['message']}", soft_wrap=True, markup=False)


def _print_rounds(facts: dict[str, Any]) -> None:
    rows = []
    for entry in facts["rounds"]:
        report = entry["report"]
        for device, errors in report.get("devices", {}).items():
            cells = [errors[m]["mape"] if m in errors else None for m in METRICS]
            labels = report["labels"].get(device)
            judged = max((errors[m]["count"] for m in errors), default=None)
            rows.append((entry["number"], entry["purpose"], device, labels, judged, *cells))
    if rows:
        errors_of = (f"{metric}, MAPE %" for metric in METRICS)
        columns = ("round", "purpose", "device", "trained_on", "judged_on", *errors_of)
        console().print(table("error on architectures held out", columns, rows))


def _print_end(facts: dict[str, Any]) -> None:
    """The rule that ended the campaign, or the one that will end it first, and when."""
    end = facts["end"]
    if end is None or (facts["state"] in {"finished", "cancelled"} and not end["holds"]):
        return  # nothing is told, or it has ended with its last round
    if end["holds"]:
        text = f"enough ({end['rule']}): {end['told']}"
        if end["unmeasured"]:
            text += f"; {end['unmeasured']} configurations that were planned are left unmeasured"
    else:
        at = (end["at"] or "")[:16].replace("T", " ")
        text = (
            f"it will end by {end['rule']}, at the pace so far with about {end['labels']} labels "
            f"at {at} UTC: {end['told']}"
        )
    console().print(text, soft_wrap=True, markup=False)


def _print_left_out(report: dict[str, Any]) -> None:
    """Labels of another software stack or card than most of their device."""
    for one in report.get("left_out", []):
        told = (
            f"{one['device']}: {one['labels']} labels are left out, of another device: {one['why']}"
        )
        console().print(told, soft_wrap=True, markup=False)


def _print_transfer(report: dict[str, Any]) -> None:
    rows = [
        (device, metric, errors["from_scratch"], errors["transferred"])
        for device, by_metric in report.get("transfer", {}).items()
        for metric, errors in by_metric.items()
    ]
    if rows:
        columns = ("device", "metric", "from scratch, MAPE %", "transferred, MAPE %")
        console().print(
            table("transfer: heads of the target started from the source's weights", columns, rows)
        )


def _print_scatter(report: dict[str, Any]) -> None:
    for metric, unit in METRICS.items():
        points = [p for p in report["evaluation"] if p["metric"] == metric]
        for device in sorted({p["device"] for p in points}):
            mine = [p for p in points if p["device"] == device]
            if len(mine) >= MINIMUM_FOR_A_PLOT:
                measured = [p["measured"] for p in mine]
                predicted = [p["predicted"] for p in mine]
                title = f"{metric} ({unit}) on {device}: predicted against measured"
                console().out(scatter(measured, predicted, title=title), highlight=False)


def sparkline(values: Sequence[float | None]) -> str:
    """The latest values as bars in one word, between their least and greatest; a dot if missing."""
    values = values[-LATEST_READINGS:]
    known = [value for value in values if value is not None]
    low, span = min(known, default=0.0), max(known, default=0.0) - min(known, default=0.0)
    steps = len(_BARS) - 1
    return "".join(
        "·" if value is None else _BARS[round(steps * (value - low) / span) if span else 0]
        for value in values
    )


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """A row for people: lists and counts as words, times to the minute."""
    short: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, list):
            short[key] = ", ".join(value)
        elif isinstance(value, dict):
            short[key] = ", ".join(f"{count} {name}" for name, count in value.items())
        elif key.endswith("_at"):
            short[key] = None if value is None else str(value)[:16].replace("T", " ")
        else:
            short[key] = value
    return short
