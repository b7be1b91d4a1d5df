"""What a running campaign shows: news as lines, and below them a bar with the time still to go."""

from __future__ import annotations

import datetime
from types import TracebackType
from typing import Self

from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cluster.campaign import Progress as CampaignProgress
from cluster.spec import CampaignSpec
from trappm.tables import console


class Display:
    """Shows a campaign's progress; on a screen with a live bar, into a file as lines only."""

    def __init__(self, campaign_id: str, spec: CampaignSpec) -> None:
        self._console = console()
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[eta]}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("starting Ray", total=None, eta="")
        self._stage = ""
        budget = ", ".join(f"{spec.budget(d)} on {d}" for d in spec.devices.keys)
        self._console.print(
            f"campaign [bold]{campaign_id}[/] ({spec.name}, seed {spec.seed}): "
            f"{budget} configurations to measure",
            soft_wrap=True,
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def show(self, progress: CampaignProgress) -> None:
        for line in progress.lines:
            now = f"[dim]{datetime.datetime.now():%H:%M:%S}[/]"
            self._console.print(f"{now} {escape(line)}", soft_wrap=True)
        if not self._console.is_terminal and progress.stage != self._stage:
            left = "" if progress.eta_s is None else f", {_minutes(progress.eta_s)} to go"
            self._console.print(f"[dim]{progress.stage}{left}[/]")
        self._stage = progress.stage
        current = f"  {'; '.join(progress.current)}" if progress.current else ""
        self._bar.update(
            self._task,
            description=escape(f"{progress.stage}{current}"),
            completed=progress.done,
            total=progress.total or None,
            eta="" if progress.eta_s is None else f"{_minutes(progress.eta_s)} to go",
        )


def _minutes(seconds: float) -> str:
    return f"{int(seconds // 60)}:{int(seconds % 60):02d}"
