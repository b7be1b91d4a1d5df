"""Plots as text for the terminal, and figures as PNG files with matplotlib, which is optional."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trappm.profiler.errors import InputError, from_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def scatter(measured: Sequence[float], predicted: Sequence[float], *, title: str) -> str:
    """Return a text plot of predicted over measured values on logarithmic axes."""
    plot = _new_plot(title, 20)
    ends = [min(*measured, *predicted) * 0.9, max(*measured, *predicted) * 1.1]
    plot.xscale("log")
    plot.yscale("log")
    plot.plot(ends, ends, marker="·")
    plot.scatter(list(measured), list(predicted), marker="o")
    plot.xlabel("measured")
    plot.ylabel("predicted")
    return _text(plot)


def sample_plot(samples: Sequence[float], *, title: str) -> str:
    """Return a text plot of samples in the order in which they were taken."""
    plot = _new_plot(title, 12)
    plot.scatter(list(range(1, len(samples) + 1)), list(samples), marker="o")
    plot.xlabel("step")
    return _text(plot)


def curves(
    lines: Mapping[str, Sequence[tuple[float, float]]], *, title: str, x_label: str, y_label: str
) -> str:
    """Return a text plot of lines by name, each of points (x, y) joined in their order.

    Points have the line's number as marker, or a circle if there is only one line.
    """
    plot = _new_plot(title, 12 if len(lines) == 1 else 20)
    for number, (name, points) in enumerate(lines.items(), start=1):
        x, y = zip(*points, strict=True)
        plot.plot([*x], [*y], marker="·")
        # plotext knows the marker's first character only.
        marker, label = ("o", None) if len(lines) == 1 else (str(number % 10), name)
        plot.scatter([*x], [*y], marker=marker, label=label)
    plot.ylim(0, 1.1 * max(y for points in lines.values() for _, y in points))
    plot.xlabel(x_label)
    plot.ylabel(y_label)
    return _text(plot)


def _new_plot(title: str, height: int) -> Any:
    """Return plotext with an empty plot, which is global."""
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(72, height)
    plotext.title(title)
    return plotext


def _text(plot: Any) -> str:
    return str(plot.uncolorize(plot.build()))


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
