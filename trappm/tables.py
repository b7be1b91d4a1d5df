"""Tables and plots for the terminal, by rich and plotext."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from profiler.records import METRICS

if TYPE_CHECKING:
    import pandas as pd

    from trappm.prediction import Prediction

LONG = 30
"""Words longer than this may be broken over lines in a table."""

FIRST_COLUMNS = ("id", "architecture", "batch_size", "input_size", "device", *METRICS)
SETTINGS = ("precision", "memory_format", "optimizer", "phase", "protocol", "provenance")
"""Columns of a label that are often the same for all."""


def console() -> Console:
    return Console(highlight=False)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """A table; columns of numbers stand to the right, missing values are told as such."""
    body = [[_cell(value) for value in row] for row in rows]
    numeric = {i for row in rows for i, value in enumerate(row) if isinstance(value, int | float)}
    result = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        pad_edge=False,
    )
    for index, column in enumerate(columns):
        # Headings may break at their underscores, values at their spaces.
        words = [*column.split("_"), *(word for row in body for word in row[index].split())]
        result.add_column(
            column.replace("_", " "),
            justify="right" if index in numeric else "left",
            min_width=min(max(map(len, words), default=0), LONG),
            overflow="fold",
        )
    for row in body:
        result.add_row(*row)
    return result


def print_labels(frame: pd.DataFrame) -> None:
    """Labels as a table that fits a terminal: what is the same for all stands in one line."""
    clean = frame.astype(object).where(frame.notna(), None)
    settings = [column for column in SETTINGS if column in clean]
    same = [column for column in settings if clean[column].nunique(dropna=False) == 1]
    shown = [*FIRST_COLUMNS, *(column for column in settings if column not in same)]
    title = f"{len(clean)} labels"
    console().print(table(title, shown, clean[shown].values.tolist()))
    if same and len(clean):
        told = ", ".join(f"{column} {clean[column].iloc[0]}" for column in same)
        console().print(f"all: {told}; --json and --csv give every column", style="dim")


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
    memory = prediction.simulated_memory
    console().print(
        f"simulated on CUDA in fp32 ({prediction.memory_source}): {memory.live_mib:,.0f} MiB live, "
        f"{memory.reserved_mib:,.0f} reserved, "
        f"{memory.reserved_with_workspace_mib:,.0f} with workspace"
    )
    if prediction.memory_remark is not None:
        console().print(prediction.memory_remark, style="dim")
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
