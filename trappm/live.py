"""A bar for work that takes long: live on a screen, and lines only in a file."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress, ProgressColumn

from trappm.tables import console


class LiveBar:
    """A console, and below what is printed there one progress bar while this is entered.

    Args:
        columns: of the bar.
        to: the console; by default standard output.
    """

    def __init__(self, *columns: ProgressColumn, to: Console | None = None) -> None:
        self._console = console() if to is None else to
        self._bar = Progress(
            *columns,
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
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
