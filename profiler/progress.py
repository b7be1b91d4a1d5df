"""Types of callbacks that report progress."""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[int, int], None]
"""Called with the number of finished steps and of all steps."""

Watch = Callable[[int, int, str], None]
"""Called with the number of finished items, the number of all items, and the current item."""
