"""Plots as text for the terminal, and figures as PNG files with matplotlib, which is optional."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trappm.profiler.errors import InputError, from_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def scatter(measured: Sequence[float], predicted: Sequence[float], *, title: str) -> str:
    """Return a text plot of predicted over measured values on logarithmic axes."""

    def draw(plot: Any) -> None:
        ends = [min(*measured, *predicted) * 0.9, max(*measured, *predicted) * 1.1]
        plot.xscale("log")
        plot.yscale("log")
        plot.plot(ends, ends, marker="·")
        plot.scatter(list(measured), list(predicted), marker="o")
        plot.xlabel("measured")
        plot.ylabel("predicted")

    return _text_plot(title, 72, 20, draw)


def sample_plot(samples: Sequence[float], *, title: str) -> str:
    """Return a text plot of samples in the order in which they were taken."""

    def draw(plot: Any) -> None:
        plot.scatter(list(range(1, len(samples) + 1)), list(samples), marker="o")
        plot.xlabel("step")

    return _text_plot(title, 72, 12, draw)


def point_map(points: Mapping[str, Sequence[tuple[float, float]]], *, title: str) -> str:
    """Return a text plot of points by mark and name, such as `o labelled`."""

    def draw(plot: Any) -> None:
        for kind, places in points.items():
            mark, name = kind.split(maxsplit=1)
            if places:
                x, y = zip(*places, strict=True)
                plot.scatter([*x], [*y], marker=mark, label=name)

    return _text_plot(title, 76, 22, draw)


def _text_plot(title: str, width: int, height: int, draw: Callable[[Any], None]) -> str:
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(width, height)
    draw(plotext)
    plotext.title(title)
    text: str = plotext.uncolorize(plotext.build())
    return text


def require_matplotlib(option: str) -> None:
    """Raise InputError, which names the option that needs it, if matplotlib is missing."""
    with from_extra("evaluate", option):
        import matplotlib  # noqa: F401


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, with its size in inches, that needs no screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_png(figure: Figure, path: Path, dpi: int) -> None:
    """Write a figure as PNG, whatever the suffix of the file.

    Raises:
        InputError: The file cannot be written.
    """
    try:
        with path.open("wb") as file:
            figure.savefig(file, dpi=dpi, format="png")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from error
