"""A bar for work that takes long: live on a screen, and lines only in a file.

What shows never ends what works: a fault of the display is reported once, costs the bar, and leaves
the lines; a screen that is gone costs those as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

import typer
from rich.console import Console, RenderableType
from rich.progress import Progress, ProgressColumn
from rich.text import Text

from trappm.terminal.tables import console


class _Bar(Progress):
    """A bar with a line below it, cut to the width of the screen, for what has no room beside."""

    line_below = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.line_below:
            yield Text(f"  {self.line_below}", style="dim", no_wrap=True, overflow="ellipsis")


class LiveBar:
    """A console, and below what is printed there one progress bar while this is entered.

    Args:
        columns: of the bar.
        to: the console; by default standard output.
    """

    def __init__(self, *columns: ProgressColumn, to: Console | None = None) -> None:
        self._console = console() if to is None else to
        self._bar = _Bar(
            *columns,
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._faults = 0

    def __enter__(self) -> Self:
        self._safely(self._bar.start)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._safely(self._bar.stop)

    def _safely(self, show: Callable[[], object]) -> None:
        """Shows something: without the bar after a fault, and nothing more after a second one."""
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
                        "the work goes on",
                        err=True,
                    )
