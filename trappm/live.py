"""A bar for work that takes long: live on a screen, and lines only in a file."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.progress import Progress, ProgressColumn

from trappm.tables import console


class LiveBar:
    """A console, and below what is printed there one progress bar while this is entered."""

    def __init__(self, *columns: ProgressColumn) -> None:
        self._console = console()
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
