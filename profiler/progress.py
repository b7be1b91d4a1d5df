"""Callables that hear how far long work has come."""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[int, int], None]
"""Called with steps done and steps in all."""

Watch = Callable[[int, int, str], None]
"""Called with what is done, how much there is in all, and what is being done."""
