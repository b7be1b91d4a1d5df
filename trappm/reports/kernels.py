"""Progress and results of `trappm measure --kernels`.

Progress goes to standard error, results to standard output.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from trappm.profiler.kernels.ceilings import Ceilings, ceilings, sentence
from trappm.profiler.kernels.kernel_call import KernelMeasurement
from trappm.profiler.records import Outcome
from trappm.terminal.progress_bars import LiveBar

_EVERY_S = 2.0
"""Seconds between two lines of progress in a file."""


class KernelDisplay(LiveBar):
    """Progress of timing kernels on standard error: a bar on a terminal, lines in a file."""

    def __init__(self) -> None:
        super().__init__(
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("to go"),
            TextColumn("{task.description}"),
            to=Console(stderr=True, highlight=False),
        )
        self._task = self._bar.add_task("")
        self._done, self._shown_at = 0, 0.0

    def show(self, result: KernelMeasurement, count: int) -> None:
        """Show a result; kernels that are timed again come after the first `count`."""
        self._done += 1
        line, total = str(result.call), max(count, self._done)
        self._bar.update(self._task, completed=self._done, total=total, description=line)
        now = time.monotonic()
        if self._bar.disable and (now - self._shown_at >= _EVERY_S or self._done == count):
            self._shown_at = now
            typer.echo(f"kernel {self._done} of {count}: {line}", err=True)


def report(
    device: str, results: Sequence[KernelMeasurement], seconds: float, *, as_json: bool
) -> None:
    """Print the number of kernels and the ceilings, then what failed."""
    last = {result.call: result for result in results}
    outcomes = Counter(result.outcome for result in last.values())
    known = ceilings(results)
    if as_json:
        typer.echo(json.dumps(facts(device, last.values(), known, seconds)))
        return
    missing = len(last) - outcomes[Outcome.OK]
    but = f", {missing} of {len(last)} not" if missing else ""
    is_of_ranks = all(call.form.is_collective for call in last)
    what, reached = ("collectives", "") if is_of_ranks else ("kernels", f" {sentence(known)}.")
    typer.echo(
        f"{device}: {outcomes[Outcome.OK]} {what} measured in {seconds:.0f} s{but}.{reached}"
    )
    for outcome, count in sorted(outcomes.items()):
        example = next(result for result in last.values() if result.outcome is outcome)
        if outcome is not Outcome.OK:
            typer.echo(f"  {outcome:<12} {count:>4}  such as {example.call}: {example.message}")


def facts(
    device: str, results: Any, known: Ceilings, seconds: float | None = None
) -> dict[str, Any]:
    """Return the result as plain JSON values."""
    results = list(results)
    return {
        "device": device,
        "kernels": len(results),
        "outcomes": dict(Counter(result.outcome.value for result in results)),
        "seconds": seconds,
        "ceilings": asdict(known),
    }
