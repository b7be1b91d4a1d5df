"""Figures as PNG files: matplotlib, which is optional, is asked for in one place."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from trappm.profiler.errors import InputError

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


def save_png(figure: Figure, path: Path, dpi: int) -> None:
    """Writes a figure as PNG, whatever the file is called.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        with path.open("wb") as file:
            figure.savefig(file, dpi=dpi, format="png")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from error
