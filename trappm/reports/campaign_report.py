"""A campaign's facts as tables and plots for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trappm.cluster.scheduler.training_report import TrainingReport
from trappm.profiler.models.known_names import is_prefixed
from trappm.profiler.records import METRICS
from trappm.reports.campaign_facts import CampaignFacts, CampaignRow, standing
from trappm.store import AssignmentState
from trappm.store.records import EventRecord
from trappm.terminal.tables import console, print_line, scatter, table

MINIMUM_FOR_A_PLOT = 3
LATEST_READINGS = 20
_BARS = "▁▂▃▄▅▆▇█"


def print_campaigns(rows: Sequence[CampaignRow]) -> None:
    if not rows:
        console().print("no campaign yet; start one with: trappm campaign launch --preset laptop")
        return
    columns = ("id", "name", "state", "labels", "missing", "seed", "created_at", "finished_at")
    cells = [
        (
            row.id,
            row.name,
            row.state,
            row.labels,
            row.missing,
            row.seed,
            _minute(row.created_at),
            row.finished_at and _minute(row.finished_at),
        )
        for row in rows
    ]
    console().print(table("campaigns", columns, cells))
    for row in rows:
        if row.next_command is not None:
            print_line(f"{row.id} is {standing(row.state, row.next_command)}")


def print_status(facts: CampaignFacts) -> None:
    out = console()
    out.print(f"campaign [bold]{facts.id}[/] ({facts.name}): {facts.standing}")
    _print_progress(facts)
    _print_setbacks(facts)
    print_line(str(facts.cost))
    _print_end(facts)
    _print_missing(facts)
    for event in facts.events:
        print_line(event_line(event))


def print_report(facts: CampaignFacts) -> None:
    out = console()
    out.print(f"\ncampaign [bold]{facts.id}[/] ({facts.name}): {facts.standing}")
    _print_progress(facts)
    if facts.trained:
        _, report = facts.trained[-1]
        for left_out in report.left_out:
            print_line(str(left_out))
        _print_transfer(report)
        _print_scatter(report)
    _print_setbacks(facts)
    if facts.rehearsal_on:
        print_line(
            f"\nA rehearsal: {', '.join(facts.rehearsal_on)} runs nothing, so what is shown here "
            "was not measured on such a device, and no snapshot is published."
        )
    if facts.missing:
        out.print()
    _print_missing(facts)
    if facts.snapshot:
        out.print("\nNext:")
        out.print(f"  trappm labels query --device {facts.source} --limit 10")
        out.print("  trappm snapshot pull --to my-snapshot")
        print_line(f"  trappm predict {_example(facts.spec)} --device {facts.source}")


def _example(spec: Mapping[str, Any]) -> str:
    """Return a question for its snapshot: about a transformer if the pool begins with one."""
    groups = spec["pool"]["groups"] if isinstance(spec["pool"], Mapping) else []
    first = {key: values[0] for key, values in groups[0].items() if values} if groups else {}
    name = str(first.get("architectures", ""))
    if not is_prefixed(name) or "*" in name or "sequence_lengths" not in first:
        return "resnet18 --batch-size 4 --input-size 96"
    return (
        f"{name} --batch-size {first['batch_sizes']} --sequence-length "
        f"{first['sequence_lengths']} --optimizer {first['optimizers']}"
    )


def event_line(event: EventRecord) -> str:
    """One line for an event, with its time."""
    at, message = event.at[:19].replace("T", " "), event.message.get("message", "")
    return f"{at} UTC  {event.kind}: {message}"


def errors_by_round(facts: CampaignFacts) -> list[tuple[object, ...]]:
    """Round, purpose, device, labels trained on, labels judged on, and each metric's MAPE."""
    rows: list[tuple[object, ...]] = []
    for part, report in facts.trained:
        for device, errors in report.devices.items():
            mapes = [errors[m]["mape"] if m in errors else None for m in METRICS]
            counts = [errors[m]["count"] for m in errors]
            judged = max((count for count in counts if count is not None), default=None)
            trained = report.labels.get(device)
            rows.append((part.number, str(part.purpose), device, trained, judged, *mapes))
    return rows


MAPES = tuple(f"{metric}, MAPE %" for metric in METRICS)


def _minute(at: str) -> str:
    return at[:16].replace("T", " ")


def _print_progress(facts: CampaignFacts) -> None:
    """Assignments, attempts, canaries and errors by round."""
    states = tuple(AssignmentState)
    rows = [(d, *(n.get(s, 0) for s in states)) for d, n in facts.assignments.items()]
    console().print(table("assignments", ("device", *map(str, states)), rows))
    attempts = [
        (device, outcome, count)
        for device, counts in facts.outcomes.items()
        for outcome, count in counts.items()
    ]
    console().print(table("attempts by outcome", ("device", "outcome", "count"), attempts))
    _print_canary(facts)
    if errors := errors_by_round(facts):
        columns = ("round", "purpose", "device", "trained_on", "judged_on", *MAPES)
        console().print(table("error on architectures held out", columns, errors))


def _print_canary(facts: CampaignFacts) -> None:
    if not facts.canary:
        return
    rows = [
        (
            series.device,
            series.host,
            series.readings,
            sparkline(series.step_times_ms),
            series.reference_ms,
            series.last_ms,
            None if series.last_drift is None else 100 * series.last_drift,
            series.decision,
        )
        for series in facts.canary
    ]
    columns = (
        "device", "host", "readings", "step times", "reference, ms", "last, ms", "drift, %",
        "decision",
    )  # fmt: skip
    console().print(table("canary: is each device still itself?", columns, rows))
    for series in facts.canary:
        if series.message:
            print_line(f"{series.device}: {series.message}")


def _print_end(facts: CampaignFacts) -> None:
    """The rule that ended the campaign, or the one that will end it first, and when."""
    end = facts.end
    if end is None or (facts.has_ended and not end.holds):
        return  # it has ended with its last round
    if end.holds:
        text = f"enough ({end.rule}): {end.reason}"
        if end.unmeasured:
            text += f"; {end.unmeasured} configurations that were planned are left unmeasured"
    else:
        text = (
            f"it will end by {end.rule}, at the pace so far with about {end.labels} labels "
            f"at {end.at:%Y-%m-%d %H:%M} UTC: {end.reason}"
        )
    print_line(text)


def _print_missing(facts: CampaignFacts) -> None:
    if facts.missing:
        print_line(facts.missing.text)


def _print_setbacks(facts: CampaignFacts) -> None:
    """Last, where it is not overlooked: what got worse."""
    if facts.setbacks:
        console().print("errors that rose, beside what chance may be:", style="bold")
    for setback in facts.setbacks:
        print_line(f"  {setback}")


def _print_transfer(report: TrainingReport) -> None:
    rows = [
        (device, metric, errors.from_scratch, errors.transferred)
        for device, by_metric in report.transfer.items()
        for metric, errors in by_metric.items()
    ]
    if rows:
        columns = ("device", "metric", "from scratch, MAPE %", "transferred, MAPE %")
        console().print(
            table("transfer: heads of the target started from the source's weights", columns, rows)
        )


def _print_scatter(report: TrainingReport) -> None:
    for metric, unit in METRICS.items():
        judgements = [j for j in report.evaluation if j.metric == metric]
        for device in sorted({j.device for j in judgements}):
            mine = [j for j in judgements if j.device == device]
            if len(mine) >= MINIMUM_FOR_A_PLOT:
                measured = [j.measured for j in mine]
                predicted = [j.predicted for j in mine]
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
