"""Tables and plots for the terminal, by rich and plotext."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

LONG = 30
"""Words longer than this may be broken over lines in a table."""
SHORT = 12
"""Words shorter than this never are."""
_GAP = 2
"""Spaces between columns."""


def console() -> Console:
    return Console(highlight=False)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """A table; columns of numbers are right-aligned, missing values are marked as such."""
    body = [[cell(value) for value in row] for row in rows]
    numeric = {i for row in rows for i, value in enumerate(row) if isinstance(value, int | float)}
    headings = [column.replace("_", " ") for column in columns]
    lines = [[heading, *(row[i] for row in body)] for i, heading in enumerate(headings)]
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
    for index, (heading, width) in enumerate(zip(headings, _widths(lines), strict=True)):
        result.add_column(
            heading,
            justify="right" if index in numeric else "left",
            width=width,
            overflow="fold",
        )
    for row in body:
        result.add_row(*map(Text, row))  # values are no markup
    return result


def _widths(columns: Sequence[Sequence[str]]) -> list[int]:
    """Widths that break nothing if the terminal has room, else at spaces, else long words."""
    whole = [max(len(line) for cell in cells for line in cell.split("\n")) for cells in columns]
    narrowest = [
        min(max((len(word) for cell in cells for word in cell.split()), default=1), LONG)
        for cells in columns
    ]
    room = console().width - _GAP * (len(columns) - 1)
    while sum(narrowest) > room and max(narrowest) > SHORT:
        narrowest[narrowest.index(max(narrowest))] -= 1
    spare = max(room - sum(narrowest), 0)
    widths = []
    for wanted, width in zip(whole, narrowest, strict=True):
        more = min(max(wanted - width, 0), spare)
        spare -= more
        widths.append(width + more)
    return widths


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints a table whole; one with too many columns for the terminal gets long lines."""
    if title:
        console().print(title, style="bold", markup=False)
    built = table("", columns, rows)
    widths = [column.width or 1 for column in built.columns]
    built.width = sum(widths) + _GAP * (len(widths) - 1)
    console().print(built, crop=False)


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
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    # What a terminal would obey is shown as a mark.
    return "".join(
        c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in str(value)
    )
