"""Progress bars for campaigns and pools: live on a terminal, lines only in a file.

A display never ends the work. A fault is reported once and costs the bar; a second fault, such as
a closed pipe, costs the lines as well.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Self

import typer
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from trappm.terminal.tables import console

if TYPE_CHECKING:
    from trappm.cluster.campaign.process import Progress as CampaignProgress
    from trappm.cluster.spec import CampaignBudget
    from trappm.cluster.trace_tasks import Traced


class _Bar(Progress):
    """A bar with a line below it, which is cut to the width of the terminal."""

    line_below = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.line_below:
            yield Text(f"  {self.line_below}", style="dim", no_wrap=True, overflow="ellipsis")


class LiveBar:
    """A progress bar below what is printed on a console (default: standard output)."""

    def __init__(self, *columns: ProgressColumn, to: Console | None = None) -> None:
        self._console = console() if to is None else to
        self._bar = _Bar(
            *columns, console=self._console, transient=True, disable=not self._console.is_terminal
        )
        self._faults = 0

    def __enter__(self) -> Self:
        self._safely(self._bar.start)
        return self

    def __exit__(self, *_: object) -> None:
        self._safely(self._bar.stop)

    def _safely(self, show: Callable[[], object]) -> None:
        """Show something: without the bar after one fault, nothing after a second one."""
        while self._faults < 2:
            try:
                show()
                return
            except (Exception, SystemExit) as error:  # rich exits when a pipe is closed
                self._faults += 1
                with contextlib.suppress(Exception):
                    self._bar.stop()
                self._bar.disable = True
                with contextlib.suppress(OSError):
                    typer.echo(
                        f"trappm: the display failed ({type(error).__name__}: {error}); "
                        "the work continues",
                        err=True,
                    )


class CampaignDisplay(LiveBar):
    """Progress of a running campaign: a line per event, and a bar with the time to go."""

    def __init__(self, campaign_id: str, spec: CampaignBudget, name: str, seed: int) -> None:
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
            f"campaign [bold]{campaign_id}[/] ({escape(name)}, seed {seed}): to measure {budget}",
            soft_wrap=not self._console.is_terminal,
        )

    def show(self, progress: CampaignProgress) -> None:
        """Show new events and the progress; display faults do not propagate."""
        self._safely(lambda: self._show(progress))

    def _show(self, progress: CampaignProgress) -> None:
        is_file, activity = not self._console.is_terminal, progress.activity
        for line in progress.lines:
            now = f"[dim]{datetime.datetime.now():%H:%M:%S}[/]"
            self._console.print(f"{now} {escape(line)}", soft_wrap=is_file)
        eta = "" if activity.eta_s is None else f"{_minutes(activity.eta_s)} to go"
        if is_file and activity.stage != self._stage:
            self._console.print(f"[dim]{', '.join(filter(None, (activity.stage, eta)))}[/]")
        self._stage = activity.stage
        self._bar.line_below = "; ".join(activity.current)
        # A stage without counts, such as publishing, shows those of measuring. Passing rich no
        # total would keep that of the learner and start again from 0.
        counts = self._measured
        if activity.total:
            counts = {"completed": activity.done, "total": activity.total}
        if activity.stage.startswith("measuring"):
            self._measured = counts
        self._bar.update(self._task, description=escape(activity.stage), **counts, eta=eta)


class RunDisplay(LiveBar):
    """A line on standard error while a step runs on the CPU, or a record in the log."""

    def __init__(self, model: str) -> None:
        super().__init__(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            to=Console(stderr=True),
        )
        what = f"running {model} on the CPU, as it depends on the values of its inputs"
        self._bar.add_task(escape(what), total=None)
        logging.getLogger("trappm.prediction").info(what)


class ProgressLine(LiveBar):
    """A bar on standard error."""

    def __init__(self) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            to=Console(stderr=True),
        )
        self._task = self._bar.add_task("reading", total=None)

    def show(self, done: int, total: int, what: str) -> None:
        """Show the number of finished items, the number of all items, and what is done."""
        self._safely(
            lambda: self._bar.update(self._task, completed=done, total=total, description=what)
        )


class BuildDisplay(LiveBar):
    """Progress of traced steps on a console (default: standard output)."""

    def __init__(self, to: Console | None = None) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("to go"),
            TimeRemainingColumn(),
            to=to,
        )
        self._task = self._bar.add_task("traced steps", total=None)
        self._shown_percent = 0
        self._done: tuple[int, int] | None = None

    @property
    def how_far(self) -> str:
        """Return the end of a sentence about a build that was interrupted."""
        return "" if self._done is None else " with {} of {} steps traced".format(*self._done)

    def show(self, done: int, total: int, latest: Traced | None) -> None:
        """Show the number of traced steps, and what is missing of the latest one."""
        self._done = done, total
        self._safely(lambda: self._show(done, total, latest))

    def _show(self, done: int, total: int, latest: Traced | None) -> None:
        if latest is None:
            self._console.print(f"traced steps: {done} of {total} are there")
            self._bar.reset(self._task, total=total, completed=done)
            return
        self._bar.line_below = str(latest)
        self._bar.update(self._task, completed=done)
        if latest.remark:
            self._console.print(f"[dim]{escape(latest.remark)}[/]", soft_wrap=True)
        percent = 100 * done // total
        if not self._console.is_terminal and percent >= self._shown_percent + 10:
            self._shown_percent = percent
            self._console.print(f"[dim]traced steps: {done} of {total}[/]")


def _minutes(seconds: float) -> str:
    return f"{int(seconds // 60)}:{int(seconds % 60):02d}"
