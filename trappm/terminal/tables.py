"""Tables, remarks and lines of text that fit a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from trappm.profiler.records import number_text

MIN_COLUMNS = 3
"""Number of columns that the narrowest terminal shows."""
MAX_NOTES = 3
"""Number of remarks below a prediction."""
_GAP = 2
"""Spaces between columns."""
_FILE_WIDTH = 1_000_000


def console() -> Console:
    """Return a console on standard output; a file gets each line whole."""
    out = Console(highlight=False)
    return out if out.is_terminal else Console(highlight=False, width=_FILE_WIDTH)


def print_line(text: str, **style: Any) -> None:
    """Print text without markup."""
    console().print(text, markup=False, **style)


def print_notes(lines: Sequence[str], *, explain: bool) -> None:
    """Print at most `MAX_NOTES` remarks, or all of them if `explain` is set."""
    shown = list(lines)
    if not explain and len(shown) > MAX_NOTES:
        rest = len(shown) - MAX_NOTES + 1
        shown = [*shown[: MAX_NOTES - 1], f"{rest} more remarks: add --explain"]
    for line in shown:
        print_line(line, style="dim")


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, every_column: bool = False
) -> None:
    """Print a table that fits the terminal (see `table`)."""
    console().print(table(title, columns, rows, every_column=every_column), crop=False)


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, every_column: bool = False
) -> Group:
    """Return a table whose number columns are right-aligned and in which `-` is a missing value.

    Columns without any value are left out. If not all columns have room, the last ones are named
    below the table instead.

    Args:
        title: Bold line above the table, or "".
        columns: Names of the columns.
        rows: One value per column.
        every_column: Show all columns; cells are then broken where there is no room.
    """
    values = list(zip(columns, *rows, strict=True))
    if rows and not every_column:
        values = values[:1] + [c for c in values[1:] if any(value is not None for value in c[1:])]
    texts = [[name.replace("_", " "), *map(cell, inner)] for name, *inner in values]
    left_out: list[str] = []
    while not every_column and len(texts) > MIN_COLUMNS:
        if sum(_least_width(column) + _GAP for column in texts) - _GAP <= console().width:
            break
        left_out.insert(0, texts.pop()[0])
    inner = Table(
        header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False,
        pad_edge=False,
    )  # fmt: skip
    for (name, *cells), column in zip(texts, values, strict=False):
        is_number = any(isinstance(value, int | float) for value in column[1:])
        inner.add_column(
            name,
            justify="right" if is_number else "left",
            no_wrap=not every_column and not _has_spaces(cells),
            overflow="fold",
        )
    for row in zip(*(cells for _, *cells in texts), strict=True):
        inner.add_row(*map(Text, row))  # values are no markup
    parts: list[RenderableType] = [Text(title, style="bold")] if title else []
    parts.append(inner)
    if left_out:
        parts.append(Text(f"on a wider screen: {'; '.join(left_out)}", style="dim"))
    return Group(*parts)


def _has_spaces(cells: Sequence[str]) -> bool:
    return any(" " in text or "\n" in text for text in cells)


def _least_width(column: Sequence[str]) -> int:
    """Return the width that breaks no word of a column of sentences, and no other cell."""
    parts = " ".join(column).split() if _has_spaces(column[1:]) else column
    return max(map(len, parts), default=0)


def minute(at: object) -> str:
    """Return the text of an ISO 8601 time to the minute."""
    return str(at)[:16].replace("T", " ")


def cell(value: Any) -> str:
    """Return the text of a value in a table, in which control characters are replaced."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return number_text(value)
    return "".join(
        c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in str(value)
    )
