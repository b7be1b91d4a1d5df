"""Tables and plots of campaigns for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from trappm.profiler.models.known_names import is_prefixed
from trappm.profiler.records import METRICS
from trappm.reports.campaign_facts import CampaignFacts, CampaignSummary
from trappm.terminal.plots import scatter
from trappm.terminal.tables import console, minute, print_line, print_table

if TYPE_CHECKING:
    from trappm.cluster.campaign.training import TrainingReport

MINIMUM_FOR_A_PLOT = 3
LATEST_READINGS = 20
_BARS = "▁▂▃▄▅▆▇█"
_MAPES = tuple(metric.rpartition("_")[0] for metric in METRICS)


def print_campaigns(rows: Sequence[CampaignSummary]) -> None:
    """Print all campaigns, and how to continue those that are interrupted or paused."""
    if not rows:
        print_line("no campaign yet; start one with: trappm campaign launch --preset laptop")
        return
    columns = ("id", "name", "state", "labels", "missing", "seed", "created_at", "finished_at")
    cells = [
        (
            *(row.id, row.name, row.state, row.labels, row.missing, row.seed),
            minute(row.created_at),
            row.finished_at and minute(row.finished_at),
        )
        for row in rows
    ]
    print_table("campaigns", columns, cells)
    for row in rows:
        if row.next_command is not None:
            print_line(f"{row.id} is {row.state}; continue with: {row.next_command}")


def print_status(facts: CampaignFacts) -> None:
    """Print progress, rates, errors, cost and the latest events of a campaign."""
    _print_findings(facts)
    for line in _remarks(facts):
        print_line(line)


def print_report(facts: CampaignFacts) -> None:
    """Print what a campaign found, and what to do next."""
    print_line("")
    _print_findings(facts)
    if facts.trained:
        _, report = facts.trained[-1]
        for left_out in report.left_out:
            print_line(str(left_out))
        _print_transfer(report)
        _print_scatter(report)
    if facts.rehearsal_on:
        print_line(
            f"\nA rehearsal: {', '.join(facts.rehearsal_on)} runs nothing, so what is shown here "
            "was not measured on such a device, and no snapshot is published."
        )
    if facts.missing:
        print_line(f"\n{facts.missing.text}")
        for reason in facts.missing.reasons:
            print_line(reason)
    if facts.snapshot:
        source = next(iter(facts.devices))
        print_line("\nNext:")
        print_line(f"  trappm labels query --device {source} --limit 10")
        print_line("  trappm snapshot pull --to my-snapshot")
        print_line(f"  trappm predict {_example(facts.spec)} --device {source}")


def _example(spec: Mapping[str, Any]) -> str:
    """Return arguments of `trappm predict` for the first model of the campaign's pool."""
    groups = spec["pool"]["groups"] if isinstance(spec["pool"], Mapping) else []
    first = {key: values[0] for key, values in groups[0].items() if values} if groups else {}
    name = str(first.get("architectures", ""))
    if not is_prefixed(name) or "*" in name or "sequence_lengths" not in first:
        return "resnet18 --batch-size 4 --input-size 96"
    return (
        f"{name} --batch-size {first['batch_sizes']} --sequence-length "
        f"{first['sequence_lengths']} --optimizer {first['optimizers']}"
    )


def sparkline(values: Sequence[float | None]) -> str:
    """Return the latest values as bars between their minimum and maximum; a dot if missing."""
    values = values[-LATEST_READINGS:]
    known = [value for value in values if value is not None]
    low, span = min(known, default=0.0), max(known, default=0.0) - min(known, default=0.0)
    steps = len(_BARS) - 1
    return "".join(
        "·" if value is None else _BARS[round(steps * (value - low) / span) if span else 0]
        for value in values
    )


def _title(facts: CampaignFacts) -> str:
    minutes = None if facts.has_ended else facts.minutes_to_go
    to_go = f", about {minutes:,.0f} minutes to go" if minutes else ""
    return f"campaign {facts.id} ({facts.name}): {facts.standing}{to_go}"


def _progress(facts: CampaignFacts) -> tuple[str, Sequence[str], list[tuple[Any, ...]]]:
    """Return title, columns and rows; nothing works and nothing is to come after the end."""
    columns = ["device", "done", "failed", "budget", "measuring", "workers", "attempts/min"]
    rows = [(name, *astuple(device)) for name, device in facts.devices.items()]
    if facts.has_ended:
        shown = [at for at, name in enumerate(columns) if name != "workers"]
        columns = [columns[at] for at in shown]
        rows = [tuple(row[at] for at in shown) for row in rows]
    return "progress", columns, rows


_ERRORS = (
    "error on architectures held out (MAPE, %)",
    ("round", "purpose", "device", "trained_on", "judged_on", *_MAPES),
)


def _errors_by_round(facts: CampaignFacts) -> list[tuple[object, ...]]:
    """Return round, purpose, device, labels trained on, labels judged on, and MAPE by metric."""
    rows: list[tuple[object, ...]] = []
    for part, report in facts.trained:
        for device, errors in report.devices.items():
            mapes = [errors[m]["mape"] if m in errors else None for m in METRICS]
            counts = [errors[m]["count"] for m in errors]
            judged = max((count for count in counts if count is not None), default=None)
            trained = report.labels.get(device)
            rows.append((part.number, str(part.purpose), device, trained, judged, *mapes))
    return rows


def _print_findings(facts: CampaignFacts) -> None:
    """Print progress, attempts, canaries and errors by round."""
    print_line(_title(facts), style="bold")
    print_table(*_progress(facts))
    attempts = [
        (device, outcome, count)
        for device, counts in facts.outcomes.items()
        for outcome, count in counts.items()
    ]
    print_table("attempts by outcome", ("device", "outcome", "count"), attempts)
    _print_canary(facts)
    if errors := _errors_by_round(facts):
        print_table(*_ERRORS, errors)


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
    print_table("canary readings", columns, rows)
    for series in facts.canary:
        if series.message:
            print_line(f"{series.device}: {series.message}")


def _remarks(facts: CampaignFacts) -> list[str]:
    """Return lines about the cost, the end, missing labels and the latest events."""
    lines = [str(facts.cost)]
    end = facts.end
    if end is not None and end.holds:
        rest = f"; {end.unmeasured} planned configurations are not measured"
        lines.append(f"enough ({end.rule}): {end.reason}{rest if end.unmeasured else ''}")
    elif end is not None and not facts.has_ended:
        lines.append(
            f"it will end by {end.rule}, at the pace so far with about {end.labels} labels "
            f"at {end.at:%Y-%m-%d %H:%M} UTC: {end.reason}"
        )
    if facts.missing:
        lines += [facts.missing.text, *facts.missing.reasons]
    for event in facts.events:
        at = event.at[:19].replace("T", " ")
        lines.append(f"{at} UTC  {event.kind}: {event.message.get('message', '')}")
    return lines


def _print_transfer(report: TrainingReport) -> None:
    rows = [
        (device, metric, errors.from_scratch, errors.transferred)
        for device, by_metric in report.transfer.items()
        for metric, errors in by_metric.items()
    ]
    if rows:
        columns = ("device", "metric", "from scratch, MAPE %", "transferred, MAPE %")
        title = "transfer: heads of the target started from the source's weights"
        print_table(title, columns, rows)


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
