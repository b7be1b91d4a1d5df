"""Plots of an evaluation as PNG files, by matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from research.evaluation.evaluation import Evaluation
from research.evaluation.scores import joined
from trappm.profiler.errors import InputError, from_extra
from trappm.terminal.plots import new_figure, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

UNITS = {"memory_mib": "MiB", "step_time_ms": "ms", "power_w": "W", "energy_j": "J"}
MAX_FAMILIES = 20
"""Number of families with a bar or color of their own, the largest ones."""
LEAST_POINTS = 5
"""Least number of architectures in a map of embeddings."""
_LEGEND = {"fontsize": 8, "frameon": False}


def check_plots(folder: Path) -> None:
    """Raise InputError if plots cannot be drawn into the folder."""
    require_matplotlib("--plots")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--plots {folder} is not a folder")
    if not folder.absolute().parent.is_dir():
        raise InputError(f"--plots {folder}: there is no folder {folder.parent}")


def draw(evaluation: Evaluation, folder: Path) -> Iterator[Path]:
    """Draw the first split into the folder, and yield the files.

    Raises:
        InputError: A file cannot be written.
    """
    first = evaluation.runs[0].split
    judged = [r for r in evaluation.report["results"] if r["split"] == first and r.get("accuracy")]
    whole = [result for result in judged if result["labels"] is None]
    drawings: dict[str, Figure | None] = {"embeddings": _embeddings(evaluation)}
    if whole:
        drawings["predicted_against_measured"] = _scatter(evaluation, whole)
        drawings["error_by_family"] = _families(whole)
    if len(whole) < len(judged):
        drawings["learning_curves"] = _curves(evaluation, judged)
    if reliable := [result for result in judged if result.get("reliability")]:
        drawings["reliability"] = _reliability(reliable)
    try:
        folder.mkdir(exist_ok=True)
        for name, figure in drawings.items():
            if figure is not None:
                path = folder / f"{name}.png"
                figure.savefig(path, dpi=120)
                yield path
    except OSError as error:
        raise InputError(f"plots cannot be written to {folder}: {error.strerror}") from error


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = new_figure(width, height)
    return figure, figure.subplots()


def _decades(axis: Axes) -> None:
    """Label 1, 2 and 5 of each decade of both axes, in plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    for side in (axis.xaxis, axis.yaxis):
        side.set_major_locator(LogLocator(subs=(1, 2, 5)))
        side.set_major_formatter(StrMethodFormatter("{x:g}"))
        side.set_minor_formatter(NullFormatter())


def _title(result: dict[str, Any]) -> str:
    return f"{result['estimator']}{' (started)' if result['transferred'] else ''}"


def _scatter(evaluation: Evaluation, results: list[dict[str, Any]]) -> Figure:
    """Draw one panel per estimator, all seeds together."""
    samples, unit = evaluation.samples, UNITS[evaluation.report["metric"]]
    figure = new_figure(3.2 * len(results) + 0.7, 4.1)
    panels = figure.subplots(1, len(results), squeeze=False, sharey=True)[0]
    for axis, result in zip(panels, results, strict=True):
        identity = (result["split"], None, result["estimator"], result["transferred"])
        test, estimate = joined(
            [
                run
                for run in evaluation.runs
                if (run.split, run.labels, run.estimator, run.transferred) == identity
            ]
        )
        rows = samples.judged[test]
        measured, predicted = samples.values[test][rows], estimate.median[rows]
        ends = np.array([measured.min() * 0.8, measured.max() * 1.25])
        axis.plot(ends, ends, color="0.3", linewidth=0.8)
        axis.fill_between(ends, 0.9 * ends, 1.1 * ends, color="0.85")
        axis.scatter(measured, predicted, s=5, alpha=0.35, linewidths=0, color="tab:blue")
        axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
        axis.set(xlabel=f"measured, {unit}")
        axis.set_title(f"{_title(result)}: {result['accuracy']['mape']:.1f} %", fontsize=10)
        _decades(axis)
    panels[0].set_ylabel(f"predicted, {unit}")
    return figure


def _families(results: list[dict[str, Any]]) -> Figure:
    errors = pd.DataFrame(
        [
            {"family": family, "count": errors["count"], _title(result): errors["mape"]}
            for result in results
            for family, errors in result["by_family"].items()
        ]
    )
    table = errors.groupby("family").max().nlargest(MAX_FAMILIES, "count").drop(columns="count")
    figure, axis = _figure(7, 1.2 + 0.075 * (len(results) + 1.5) * len(table))
    table.sort_index(ascending=False).plot.barh(ax=axis, width=0.85, ylabel="", logx=True)
    axis.set_xlabel("mean absolute percentage error")
    axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, **_LEGEND)
    return figure


def _embeddings(evaluation: Evaluation) -> Figure | None:
    """Draw the embeddings of each architecture in two dimensions, if there is an encoder."""
    embed = next((e.embed for e in evaluation.estimators if hasattr(e, "embed")), None)
    samples = evaluation.samples
    _, first = np.unique(samples.architectures, return_index=True)
    if embed is None or len(first) < LEAST_POINTS:
        return None
    families = samples.families[np.sort(first)]
    graphs = [workload.graph for workload in samples.at(np.sort(first))]
    points = projected(embed(graphs), np.random.default_rng(evaluation.report["seeds"][0]))
    from matplotlib import colormaps

    figure, axis = _figure(8, 5.5)
    largest = pd.Series(families).value_counts().index[:MAX_FAMILIES].tolist()
    others = ~np.isin(families, largest)
    x, y = points[others].T
    axis.scatter(x, y, s=10, color="0.85", linewidths=0, label="others")
    for place, family in enumerate(sorted(largest)):
        color = colormaps["tab20"](place % 20)
        x, y = points[families == family].T
        axis.scatter(x, y, s=16, linewidths=0, color=color, label=family)
    axis.set(xticks=[], yticks=[], title="t-SNE of the embeddings, by family")
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), **_LEGEND)
    return figure


def _curves(evaluation: Evaluation, results: list[dict[str, Any]]) -> Figure:
    """Draw the error from few labels to all."""
    tests = [len(run.test) for run in evaluation.runs if run.split == results[0]["split"]]
    everything = round(len(evaluation.samples) - float(np.mean(tests)))
    points = pd.DataFrame(
        {
            "title": _title(result),
            "labels": result["labels"] if result["labels"] is not None else everything,
            "mape": result["accuracy"]["mape"],
            "spread": result["accuracy_deviation"].get("mape") or 0.0,
        }
        for result in results
    )
    figure, axis = _figure(6.5, 4)
    for title, rows in points.sort_values("labels").groupby("title", sort=False):
        axis.errorbar(
            rows.labels, rows.mape, rows.spread, marker="o", markersize=4, capsize=2, label=title
        )
    axis.set(xscale="log", yscale="log", xlabel="labels", ylabel="mean absolute percentage error")
    _decades(axis)
    axis.legend(**_LEGEND)
    return figure


def _reliability(results: list[dict[str, Any]]) -> Figure:
    """Draw the coverage of intervals against their nominal one."""
    figure, axis = _figure(4.6, 4.4)
    axis.plot([0, 100], [0, 100], color="0.3", linewidth=0.8)
    for result in results:
        covered = result["reliability"]
        labels = "" if result["labels"] is None else f", {result['labels']} labels"
        nominal = [float(name) for name in covered]
        label = f"{_title(result)}{labels}"
        axis.plot(nominal, list(covered.values()), marker="o", markersize=4, label=label)
    axis.set(xlim=(0, 100), ylim=(0, 100), aspect="equal", xlabel="interval, %")
    axis.set_ylabel("measurements inside, %")
    axis.legend(**_LEGEND)
    return figure


def projected(
    embeddings: npt.NDArray[np.float32], generator: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Project embeddings to two dimensions by t-SNE (van der Maaten and Hinton 2008).

    Columns are scaled first: sums over nodes differ by orders of magnitude.

    Args:
        embeddings: Shape (n, width).
        generator: Draws the seed.

    Returns:
        Points, shape (n, 2).

    Raises:
        InputError: scikit-learn is not installed.
    """
    with from_extra("evaluate", "a map of embeddings"):
        from sklearn.manifold import TSNE

    spread = embeddings.std(axis=0)
    scaled = (embeddings - embeddings.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    perplexity, seed = min(30.0, (len(embeddings) - 1) / 3), int(generator.integers(2**31))
    tsne = TSNE(perplexity=perplexity, init="pca", random_state=seed)
    points: npt.NDArray[np.float64] = tsne.fit_transform(scaled)
    return points
