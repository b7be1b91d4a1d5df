"""What answers look like in a notebook: HTML without scripts, every word of it escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def card(answer: str, rows: Iterable[Sequence[str]], remarks: Iterable[str] = ()) -> str:
    """The answer in a sentence, a table without a heading, and remarks in small letters."""
    cells = "".join(
        f"<tr>{''.join(f'<td>{escape(word)}</td>' for word in row)}</tr>" for row in rows
    )
    small = "".join(f"<div><small>{escape(remark)}</small></div>" for remark in remarks)
    return f"<div><strong>{escape(answer)}</strong><table>{cells}</table>{small}</div>"
