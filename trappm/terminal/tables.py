"""Tables and plots for the terminal, by rich and plotext."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trappm.profiler.number_text import number_text

LONG = 30
"""Words longer than this may be broken over lines in a table."""
SHORT = 12
"""Words shorter than this never are."""
LEAST_COLUMNS = 3
"""So many are shown on the narrowest screen."""
MOST_NOTES = 3
"""Remarks below an answer."""
_GAP = 2
"""Spaces between columns."""


def console() -> Console:
    return Console(highlight=False)


def print_line(text: str, **style: Any) -> None:
    """Prints a line of plain words, between words onto the next where a screen ends."""
    out = console()
    out.print(text, soft_wrap=not out.is_terminal, markup=False, **style)


def print_notes(lines: Sequence[str], *, explain: bool) -> None:
    """Print remarks: `MOST_NOTES` lines at most, or all of them to explain."""
    shown = list(lines)
    if not explain and len(shown) > MOST_NOTES:
        rest = len(shown) - MOST_NOTES + 1
        shown = [*shown[: MOST_NOTES - 1], f"{rest} more remarks: add --explain"]
    for line in shown:
        print_line(line, style="dim")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """A table without the columns that are empty all the way down.

    Columns of numbers are right-aligned, missing values are marked as such.
    """
    shown = _filled(columns, rows)
    return _built(title, shown, _widths(shown))


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, every_column: bool = False
) -> None:
    """Prints a table without the columns that are empty all the way down.

    On a screen the last columns that it has no room for are named below; a file gets all of them,
    in long lines, and so does whoever asks for `every_column`.
    """
    if title:
        console().print(title, style="bold", markup=False)
    shown = _filled(columns, rows, every_column=every_column)
    left_out: list[str] = []
    narrow = console().is_terminal and not every_column
    while narrow and _too_wide(shown) and len(shown) > LEAST_COLUMNS:
        left_out.insert(0, shown.pop().lines[0])
    whole = not console().is_terminal  # a file has no edge to break words at
    built = _built("", shown, [column.whole for column in shown] if whole else _widths(shown))
    built.width = sum(column.width or 1 for column in built.columns) + _GAP * (len(shown) - 1)
    console().print(built, crop=False)
    if left_out:
        console().print(f"on a wider screen: {'; '.join(left_out)}", style="dim", markup=False)


class _Column(NamedTuple):
    """A heading and the cells below it, as they are shown."""

    lines: list[str]
    numeric: bool
    empty: bool

    @classmethod
    def of(cls, name: str, *values: Any) -> _Column:
        return cls(
            [name.replace("_", " "), *map(cell, values)],
            any(isinstance(value, int | float) for value in values),
            all(value is None for value in values),
        )

    @property
    def whole(self) -> int:
        """The width that breaks nothing."""
        return max(len(line) for text in self.lines for line in text.split("\n"))

    @property
    def narrowest(self) -> int:
        """The width that breaks no word, but for long ones."""
        return min(
            max((len(word) for text in self.lines for word in text.split()), default=1), LONG
        )


def _filled(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], *, every_column: bool = False
) -> list[_Column]:
    every = [_Column.of(*column) for column in zip(columns, *rows, strict=True)]
    return every[:1] + [c for c in every[1:] if every_column or not (rows and c.empty)]


def _too_wide(columns: Sequence[_Column]) -> bool:
    return sum(c.narrowest for c in columns) > console().width - _GAP * (len(columns) - 1)


def _built(title: str, columns: Sequence[_Column], widths: Sequence[int]) -> Table:
    result = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        pad_edge=False,
    )
    for column, width in zip(columns, widths, strict=True):
        result.add_column(
            column.lines[0],
            justify="right" if column.numeric else "left",
            width=width,
            overflow="fold",
        )
    for row in zip(*(column.lines[1:] for column in columns), strict=True):
        result.add_row(*map(Text, row))  # values are no markup
    return result


def _widths(columns: Sequence[_Column]) -> list[int]:
    """Widths that break nothing if the terminal has room, else at spaces, else long words."""
    narrowest = [column.narrowest for column in columns]
    room = console().width - _GAP * (len(columns) - 1)
    while sum(narrowest) > room and max(narrowest) > SHORT:
        narrowest[narrowest.index(max(narrowest))] -= 1
    spare = max(room - sum(narrowest), 0)
    widths = []
    for column, width in zip(columns, narrowest, strict=True):
        more = min(max(column.whole - width, 0), spare)
        spare -= more
        widths.append(width + more)
    return widths


def scatter(measured: Sequence[float], predicted: Sequence[float], *, title: str) -> str:
    """Predicted against measured on logarithmic axes, as text; the diagonal is perfection."""
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(72, 20)
    ends = [min(*measured, *predicted) * 0.9, max(*measured, *predicted) * 1.1]
    plotext.xscale("log")
    plotext.yscale("log")
    plotext.plot(ends, ends, marker="·")
    plotext.scatter(list(measured), list(predicted), marker="o")
    plotext.xlabel("measured")
    plotext.ylabel("predicted")
    plotext.title(title)
    text: str = plotext.uncolorize(plotext.build())
    return text


def cell(value: Any) -> str:
    """A value as a table shows it."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return number_text(value)
    # What a terminal would obey is shown as a mark.
    return "".join(
        c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in str(value)
    )
