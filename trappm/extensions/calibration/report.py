"""Calibrations on the terminal."""

from __future__ import annotations

from trappm.extensions.calibration.calibrating import CalibrationReport, MetricGain
from trappm.prediction.prediction import METRIC_NAMES
from trappm.terminal.tables import print_line, print_table


def print_calibration(made: CalibrationReport) -> None:
    """Print what was gained, the rows that were left out, and the next command."""
    print_line(f"{made.steps} steps on {made.device_name}, each predicted from the others:")
    columns = ("metric", "phase", "steps", "error before, %", "after, %", "calibration")
    print_table("", columns, [_row(gain) for gain in made.gains])
    for line in (*map(str, made.unusable), *made.remarks):
        print_line(line, style="dim")
    if made.folder is None:
        print_line("The calibration did not help, so there is no snapshot.")
    else:
        print_line(f"Snapshot: {made.folder}")
        print_line(f"Use it: {made.next_command}")


def _row(gain: MetricGain) -> tuple[object, ...]:
    return (
        METRIC_NAMES[gain.metric],
        gain.phase.value,
        gain.steps,
        gain.before_percent,
        gain.after_percent,
        "helped" if gain.is_better else "did not help",
    )
