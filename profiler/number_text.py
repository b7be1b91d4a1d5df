"""Numbers as people write them: digits that count, and never an exponent."""

from __future__ import annotations

import math

_NOTHING = 1e-9
"""What is smaller than this is what rounding left of a zero."""


def number_text(value: float, digits: int = 4) -> str:
    """A number with so many digits that count; those before the point are all there."""
    if not math.isfinite(value):
        return f"{value}"
    size = abs(value)
    if size < _NOTHING:
        return "0"
    decimals = max(digits - 1 - math.floor(math.log10(size)), 0)
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
