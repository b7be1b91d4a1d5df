"""Figures as PNG files: matplotlib, which is optional, is asked for in one place."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from profiler.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def require_matplotlib(option: str) -> None:
    """Raises InputError, which names the option that needs it, where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(
            f"{option} needs matplotlib; install it with: pip install trappm[evaluate]"
        )


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches that needs no screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
