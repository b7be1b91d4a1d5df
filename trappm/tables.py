"""Tables and plots for the terminal, by rich and plotext."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from profiler.records import METRICS

if TYPE_CHECKING:
    import pandas as pd

    from trappm.prediction import Prediction


def console() -> Console:
    return Console(highlight=False)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """A table; columns of numbers stand to the right, missing values are told as such."""
    body = [list(row) for row in rows]
    result = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for index, column in enumerate(columns):
        numeric = any(isinstance(row[index], int | float) for row in body)
        result.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in body:
        result.add_row(*(_cell(value) for value in row))
    return result


def print_frame(frame: pd.DataFrame, *, title: str) -> None:
    clean = frame.astype(object).where(frame.notna(), None)
    console().print(table(title, list(frame.columns), clean.itertuples(index=False)))


def print_prediction(prediction: Prediction) -> None:
    rows = []
    for metric, unit in METRICS.items():
        value = getattr(prediction, metric)
        low, high = prediction.intervals.get(metric, (None, None))
        missing = prediction.missing.get(metric)
        spread = missing if value is None else f"{low:,.4g} to {high:,.4g}"
        rows.append((metric, value, unit, spread))
    title = f"{prediction.model} on {prediction.device}, batch {prediction.batch_size}"
    console().print(table(title, ("metric", "prediction", "unit", "90 % spread"), rows))
    console().print(f"snapshot {prediction.snapshot}", style="dim")


def scatter(measured: Sequence[float], predicted: Sequence[float], *, title: str) -> str:
    """Predicted against measured on logarithmic axes, as text; the diagonal is perfection."""
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(72, 20)
    ends = [min(*measured, *predicted) * 0.9, max(*measured, *predicted) * 1.1]
    plotext.xscale("log")
    plotext.yscale("log")
    plotext.plot(ends, ends, marker="·")
    plotext.scatter(list(measured), list(predicted), marker="o")
    plotext.xlabel("measured")
    plotext.ylabel("predicted")
    plotext.title(title)
    text: str = plotext.uncolorize(plotext.build())
    return text


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)
