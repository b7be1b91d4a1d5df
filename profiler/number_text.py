"""Formatting of numbers for people: significant digits, no exponents."""

from __future__ import annotations

import math

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
