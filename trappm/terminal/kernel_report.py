"""Progress and results of `trappm measure --kernels`.

Progress goes to standard error, results to standard output.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import typer

from trappm.profiler.kernels.ceilings import Ceilings, ceilings, sentence
from trappm.profiler.kernels.kernel_call import KernelMeasurement
from trappm.profiler.records import Outcome

_EVERY_S = 2.0
"""Between two lines that say how far it is, where the last one cannot be written over."""


class Progress:
    """Says how far timing has come, and when it will be done: one line, or one now and then."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._shown_at = 0.0
        self._done = 0
        self._is_terminal = sys.stderr.isatty()

    def __call__(self, result: KernelMeasurement, count: int) -> None:
        self._done += 1
        now = time.monotonic()
        if now - self._shown_at < (0.1 if self._is_terminal else _EVERY_S) and self._done < count:
            return
        self._shown_at = now
        left_s = (now - self._begin) / self._done * max(0, count - self._done)
        which = f"{self._done} of {count}, about {left_s:.0f} s left"
        line = f"kernel {which if self._done <= count else 'once more'}: {result.call}"
        if self._is_terminal:
            typer.echo(
                f"\r\033[K{line[: shutil.get_terminal_size().columns - 1]}", err=True, nl=False
            )
        else:
            typer.echo(line, err=True)

    def end(self) -> None:
        if self._is_terminal and self._done:
            typer.echo("\r\033[K", err=True, nl=False)


def report(
    device: str, results: Sequence[KernelMeasurement], seconds: float, *, as_json: bool
) -> None:
    """Prints the answer first, then the ceilings and what failed."""
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
    """The answer as plain JSON values."""
    results = list(results)
    return {
        "device": device,
        "kernels": len(results),
        "outcomes": dict(Counter(result.outcome.value for result in results)),
        "seconds": seconds,
        "ceilings": {**asdict(known), "bandwidths": [asdict(b) for b in known.bandwidths]},
    }
