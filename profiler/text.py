"""Text for people: numbers, and suggestions for unknown names."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable

_NOTHING = 1e-9
"""Smaller numbers are rounding errors of zero."""


def number_text(value: float, digits: int = 4) -> str:
    """Return a number with this many significant digits, and all digits of its integer part."""
    if not math.isfinite(value):
        return f"{value}"
    size = abs(value)
    if size < _NOTHING:
        return "0"
    decimals = max(digits - 1 - math.floor(math.log10(size)), 0)
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


_LISTED = 20
"""Number of names to list where none is similar."""


def nearest(
    name: str, known: Iterable[str], *, otherwise: str | None = None, cutoff: float = 0.6
) -> str:
    """Return the end of an error message: similar names, or else all names.

    Args:
        name: Unknown name.
        known: Known names.
        otherwise: Text to use instead of a list where no name is similar.
        cutoff: Least similarity of a name, by difflib.
    """
    names = list(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=cutoff)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    if otherwise is not None:
        return otherwise
    if not names:
        return "there are none yet"
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"there are: {', '.join(names[:_LISTED])}{more}"
