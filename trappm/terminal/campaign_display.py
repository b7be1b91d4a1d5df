"""What a running campaign shows: news as lines, and below them a bar with the time still to go."""

from __future__ import annotations

import datetime
import textwrap
from typing import Any

from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from trappm.cluster.campaign.progress import Progress
from trappm.cluster.spec import CampaignSpec
from trappm.terminal.progress_bar import LiveBar

_TIME, _INDENT = 9, 17
"""Columns before a line of news, which are the time's, and before what is left of a long one."""
_NARROWEST = 40


class Display(LiveBar):
    """Shows a campaign's progress; on a screen with a live bar, into a file as lines only."""

    def __init__(self, campaign_id: str, spec: CampaignSpec) -> None:
        super().__init__(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[eta]}"),
        )
        self._task = self._bar.add_task("starting Ray", total=None, eta="")
        self._stage = ""
        self._measured: dict[str, Any] = {}
        budget = ", ".join(f"{spec.budget(d)} on {d}" for d in spec.devices.keys)
        self._console.print(
            f"campaign [bold]{campaign_id}[/] ({escape(spec.name)}, seed {spec.seed}): "
            f"to measure {budget}",
            soft_wrap=not self._console.is_terminal,
        )

    def show(self, progress: Progress) -> None:
        """Shows the news and how far it is; never raises what a screen can make it raise."""
        self._safely(lambda: self._show(progress))

    def _show(self, progress: Progress) -> None:
        for line in progress.lines:
            now = f"[dim]{datetime.datetime.now():%H:%M:%S}[/]"
            self._console.print(f"{now} {escape(self._wrapped(line))}", soft_wrap=True)
        if not self._console.is_terminal and progress.stage != self._stage:
            to_go = "" if progress.eta_s is None else f", {_minutes(progress.eta_s)} to go"
            self._console.print(f"[dim]{progress.stage}{to_go}[/]")
        self._stage = progress.stage
        self._bar.line_below = "; ".join(progress.current)
        # A stage that counts nothing, such as the end, shows what was measured: rich takes no total
        # for the same total, which may be the learner's, and would begin it again from 0.
        counts = self._measured
        if progress.total:
            counts = {"completed": progress.done, "total": progress.total}
        if progress.stage.startswith("measuring"):
            self._measured = counts
        self._bar.update(
            self._task,
            description=escape(progress.stage),
            **counts,
            eta="" if progress.eta_s is None else f"{_minutes(progress.eta_s)} to go",
        )

    def _wrapped(self, line: str) -> str:
        """On a screen, a line too long for it goes on below what it tells, and not below the time.

        Into a file it stays one line, for programs that search it.
        """
        if not self._console.is_terminal:
            return line
        filled = textwrap.fill(
            line,
            max(self._console.width, _NARROWEST),
            initial_indent=" " * _TIME,
            subsequent_indent=" " * _INDENT,
            break_long_words=False,
            break_on_hyphens=False,
        )
        return filled[_TIME:]


def _minutes(seconds: float) -> str:
    return f"{int(seconds // 60)}:{int(seconds % 60):02d}"
