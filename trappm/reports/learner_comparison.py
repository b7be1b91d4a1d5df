"""Table and plots of the errors of a campaign's learner and of another one by number of labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from trappm.profiler.records import METRICS
from trappm.terminal.plots import curves, new_figure, save_png
from trappm.terminal.tables import console, print_line, print_table

if TYPE_CHECKING:
    from trappm.cluster.campaign.learner_comparison import ErrorPoint, LearnerComparison


def print_comparison(made: LearnerComparison) -> None:
    """Print tables of errors by round and of transfer, and plot errors by number of labels."""
    metrics = [m for m in METRICS if any(point.metric == m for point in made.points)]
    columns = ["round", "device", "labels"]
    columns += [f"{_title(m)}\n{name}" for m in metrics for name in made.learners]
    rows: dict[tuple[int, str, int], dict[str, ErrorPoint]] = {}
    for point in made.points:
        rows.setdefault((point.round, point.device, point.labels), {})[point.metric] = point
    cells = [
        [
            *key,
            *(
                _mean(by_metric[m].errors[name]) if m in by_metric else None
                for m in metrics
                for name in made.learners
            ),
        ]
        for key, by_metric in rows.items()
    ]
    print_line("")
    title = "error on architectures held out, both learners on the same labels (MAPE, %)"
    print_table(title, columns, cells, every_column=True)
    if any(point.from_scratch for point in made.points):
        _print_transfer(made)
    counts = {point.device: point.judged_on for point in made.points}
    judged = " and ".join(f"{count} labels of {device}" for device, count in counts.items())
    print_line(f"Judged by {judged}, drawn uniformly.")
    print_line(_about_seeds(made))
    for remark in made.remarks:
        print_line(remark)
    for metric in metrics:
        lines = {name: _line(made, metric, name) for name in made.learners}
        if min(map(len, lines.values())) > 1:
            title = f"{_title(metric)} on {made.source}: error by number of labels"
            plot = curves(lines, title=title, x_label="number of labels", y_label="MAPE, %")
            console().out(plot, highlight=False)


def _print_transfer(made: LearnerComparison) -> None:
    columns = ["device", "labels", "metric"]
    columns += [f"{n}\n{way}" for n in made.learners for way in ("transferred", "from scratch")]
    rows: list[list[Any]] = [
        [point.device, point.labels, _title(point.metric)]
        + [
            _mean(values.get(name, ()))
            for name in made.learners
            for values in (point.errors, point.from_scratch)
        ]
        for point in made.points
        if point.from_scratch
    ]
    title = f"heads that started from those of {made.source}, and from scratch (MAPE, %)"
    print_table(title, columns, rows, every_column=True)


def _about_seeds(made: LearnerComparison) -> str:
    if len(made.seeds) == 1:
        other = made.learners[-1]
        command = f"trappm campaign report {made.campaign} --compare {other} --seeds 5"
        return f"Means of five trainings: {command}"
    return f"Means and deviations of {len(made.seeds)} trainings on the same labels."


def _title(metric: str) -> str:
    return metric.rpartition("_")[0].replace("_", " ")


def _mean(values: Sequence[float]) -> str | float | None:
    """Return a cell: nothing, an error, or the mean and deviation of several."""
    if len(values) < 2:
        return round(values[0], 1) if values else None
    return f"{fmean(values):.1f} ± {stdev(values):.1f}"


def _line(made: LearnerComparison, metric: str, name: str) -> list[tuple[float, float]]:
    """Return the number of labels and the mean error of the source by round."""
    return [
        (point.labels, fmean(point.errors[name]))
        for point in made.points
        if (point.device, point.metric) == (made.source, metric)
    ]


def draw_png(made: LearnerComparison, path: Path) -> None:
    """Write the papers' figure to a file: error by number of labels, a panel per head.

    Bars are deviations over seeds. `trappm.terminal.plots.require_matplotlib` has looked for
    matplotlib.

    Raises:
        InputError: The file cannot be written.
    """
    panels: dict[tuple[str, str], list[ErrorPoint]] = {}
    for point in made.points:
        panels.setdefault((point.device, point.metric), []).append(point)
    devices = list(dict.fromkeys(device for device, _ in panels))
    metrics = [m for m in METRICS if any(metric == m for _, metric in panels)]
    figure = new_figure(4.5 * len(metrics), 3.2 * len(devices))
    grid = figure.subplots(len(devices), len(metrics), squeeze=False)
    for row, device in enumerate(devices):
        for column, metric in enumerate(metrics):
            axis, points = grid[row][column], panels.get((device, metric), [])
            labels = [point.labels for point in points]
            for number, name in enumerate(made.learners):
                for style, kind in (("o-", "errors"), ("x:", "from_scratch")):
                    values = [getattr(point, kind).get(name, ()) for point in points]
                    if not values or not all(values):
                        continue
                    axis.errorbar(
                        labels,
                        [fmean(one) for one in values],
                        None if len(made.seeds) == 1 else [stdev(one) for one in values],
                        fmt=style, color=f"C{number}", capsize=3,
                        label=name if kind == "errors" else f"{name}, from scratch",
                    )  # fmt: skip
            axis.set_xticks(labels)
            axis.set_ylim(bottom=0)
            axis.set_title(f"{_title(metric)} on {device}", fontsize=10)
            axis.set_xlabel("number of labels")
            axis.set_ylabel("MAPE on held-out architectures, %", fontsize=8)
            axis.grid(color="0.9", linewidth=0.6)
            axis.legend(frameon=False, fontsize=8)
    save_png(figure, path, dpi=130)
