"""Figures as PNG files: matplotlib, which is optional, is imported in one place."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trappm.profiler.errors import InputError, from_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def require_matplotlib(option: str) -> None:
    """Raises InputError, which names the option that needs it, where matplotlib is missing."""
    with from_extra("evaluate", option):
        import matplotlib  # noqa: F401


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
