"""Tables, remarks and lines of text that fit a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from trappm.profiler.text import number_text

LONG_WORD = 30
"""Longer words may be broken over the lines of a cell."""
MIN_COLUMNS = 3
"""Number of columns that the narrowest terminal shows."""
MAX_NOTES = 3
"""Number of remarks below a prediction."""
_GAP = 2
"""Spaces between columns."""
_FILE_WIDTH = 1_000_000


def console() -> Console:
    return Console(highlight=False)


def print_line(text: str, **style: Any) -> None:
    """Print text without markup; a terminal wraps it at words, a file gets one line."""
    out = console()
    out.print(text, soft_wrap=not out.is_terminal, markup=False, **style)


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
    """Print a table that fits the terminal, or whole lines into a file."""
    out = console()
    width = out.width if out.is_terminal else _FILE_WIDTH
    out.print(table(title, columns, rows, width=width, every_column=every_column), crop=False)


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    width: int | None = None,
    every_column: bool = False,
) -> Group:
    """Return a table whose number columns are right-aligned and in which `-` is a missing value.

    Columns without any value are left out. If not all columns have room, the last ones are named
    below the table instead.

    Args:
        title: Bold line above the table, or "".
        columns: Names of the columns.
        rows: One value per column.
        width: Number of characters per line (default: those of the terminal).
        every_column: Show all columns; cells are then broken where there is no room.
    """
    width = width or console().width
    values = list(zip(columns, *rows, strict=True))
    if rows and not every_column:
        values = values[:1] + [c for c in values[1:] if any(value is not None for value in c[1:])]
    texts = [[name.replace("_", " "), *map(cell, inner)] for name, *inner in values]
    left_out: list[str] = []
    while not every_column and len(texts) > MIN_COLUMNS and sum(_narrowest(texts)) > width:
        left_out.insert(0, texts.pop()[0])
    widths = _fitted([max(map(_line_width, c)) + _GAP for c in texts], _narrowest(texts), width)
    inner = Table(
        header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False,
        pad_edge=False, width=max(sum(widths) - _GAP, 1),
    )  # fmt: skip
    for text, column, column_width in zip(texts, values, widths, strict=False):
        is_number = any(isinstance(value, int | float) for value in column[1:])
        inner.add_column(
            text[0],
            justify="right" if is_number else "left",
            width=column_width - _GAP,
            overflow="fold",
        )
    for row in zip(*(text[1:] for text in texts), strict=True):
        inner.add_row(*map(Text, row))  # values are no markup
    parts: list[RenderableType] = [Text(title, style="bold")] if title else []
    parts.append(inner)
    if left_out:
        parts.append(Text(f"on a wider screen: {'; '.join(left_out)}", style="dim"))
    return Group(*parts)


def cell(value: Any) -> str:
    """Return the text of a value in a table, in which control characters are replaced."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return number_text(value)
    return "".join(
        c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in str(value)
    )


def _line_width(text: str) -> int:
    return max(map(len, text.split("\n")))


def _narrowest(columns: Sequence[Sequence[str]]) -> list[int]:
    """Return the widths, gaps included, that break no word except long ones."""
    return [
        min(max((len(word) for text in column for word in text.split()), default=1), LONG_WORD)
        + _GAP
        for column in columns
    ]


def _fitted(widths: Sequence[int], narrowest: Sequence[int], room: int) -> list[int]:
    """Return widths whose sum is at most the room, as far as words need not be broken."""
    result = list(widths)
    while sum(result) - _GAP > room:
        spare = [width - least for width, least in zip(result, narrowest, strict=True)]
        if max(spare) <= 0:
            return result
        result[spare.index(max(spare))] -= 1
    return result
