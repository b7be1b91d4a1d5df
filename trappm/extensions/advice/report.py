"""Advice and checks on the terminal."""

from __future__ import annotations

from trappm.extensions.advice.advising import Advice, AdvisedStep, percent
from trappm.extensions.advice.guard import Check
from trappm.prediction.fit import VERDICTS
from trappm.profiler.records import number_text
from trappm.terminal.tables import print_line, print_notes, print_table

_MARK = " *"


def print_advice(advice: Advice, *, explain: bool = False) -> None:
    """Print the cheapest change, all of them as a table, and the lines of Python.

    Args:
        advice: The changes.
        explain: Print the lines of each change, and all remarks.
    """
    print_line(str(advice))
    print_line(f"As it is: {advice.before}", style="dim")
    if advice.changes:
        of_run = advice.before.run is not None
        columns = ["change", "time", "run, hours" if of_run else "step, ms", "GiB", "fits", "USD"]
        print_table("", columns, [_row(step, advice) for step in advice.changes])
    if any(not step.is_same_training for step in advice.changes):
        print_line("* It changes the arithmetic, what is trained, or how.", style="dim")
    shown = advice.changes if explain else advice.changes[: int(advice.is_reached)]
    for step in shown:
        if step.python:
            print_line(f"\n{step.change}:", style="bold")
            for line in step.python:
                print_line(f"    {line}")
    if advice.has_batch_norm and any(step.blocks for step in shown):
        print_line("A batch norm in a checkpointed block updates its statistics twice per step.")
    print_notes([*advice.remarks, *advice.before.remarks], explain=explain)


def _row(step: AdvisedStep, advice: Advice) -> tuple[object, ...]:
    """Return a row of the table, which has no columns that are equal for all or not asked for."""
    memory, run = step.memory, step.run
    times = (step.step_time_ms, *step.intervals["step_time_ms"])
    return (
        f"{step.change}{'' if step.is_same_training else _MARK}",
        percent(step.slower),
        _with_interval(*times if run is None else (run.hours, run.low_hours, run.high_hours)),
        None if memory is None else _with_interval(*(each / 1024 for each in memory)),
        None if advice.is_reached or step.verdict is None else VERDICTS[step.verdict],
        run.offers[0].usd if run is not None and run.offers else None,
    )


def _with_interval(value: float, low: float, high: float) -> str:
    """Return such as `79.9 (63.7 to 119)`."""
    texts = [number_text(each, 3) for each in (value, low, high)]
    return f"{texts[0]} ({texts[1]} to {texts[2]})"


def print_check(check: Check) -> None:
    """Print the outcome in a line, and all limits as a table."""
    print_line(str(check))
    rows = [
        (
            limit.name,
            limit.value,
            None
            if limit.low is None or limit.high is None
            else f"{number_text(limit.low)} to {number_text(limit.high)}",
            limit.unit,
            limit.most,
            limit.outcome.value,
        )
        for limit in check.limits
    ]
    print_table("", ("limit", "prediction", "90 % interval", "unit", "at most", "outcome"), rows)
