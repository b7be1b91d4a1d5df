"""Plots of an evaluation as PNG files, by matplotlib."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from research.evaluation.benchmark import SplitKind
from research.evaluation.evaluation import Evaluation, embeddings
from research.evaluation.scores import joined
from trappm.profiler.errors import InputError, from_extra
from trappm.terminal.plots import new_figure, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

UNITS = {"memory_mib": "MiB", "step_time_ms": "ms", "power_w": "W", "energy_j": "J"}
MAX_FAMILIES = 20
"""So many have a bar or a colour of their own, the largest ones."""


LEAST_POINTS = 5
"""Fewer architectures have no neighbourhoods to show."""


def check_plots(folder: Path) -> None:
    """Raises InputError if plots cannot be drawn there."""
    require_matplotlib("--plots")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--plots {folder} is not a folder")
    if not folder.absolute().parent.is_dir():
        raise InputError(f"--plots {folder}: there is no folder {folder.parent}")


def draw(evaluation: Evaluation, folder: Path) -> Iterator[Path]:
    """Draws what there is to draw of the first split, into the folder; the files that it wrote.

    Raises:
        InputError: a file cannot be written.
    """
    first = evaluation.runs[0].split
    drawings = {
        "predicted_against_measured": _scatter(evaluation, first),
        "error_by_family": _families(evaluation, first),
        "embeddings": _embeddings(evaluation),
        "learning_curves": _curves(evaluation, first),
        "reliability": _reliability(evaluation, first),
    }
    try:
        folder.mkdir(exist_ok=True)
        for name, figure in drawings.items():
            if figure is not None:
                path = folder / f"{name}.png"
                figure.savefig(path, dpi=120)
                yield path
    except OSError as error:
        raise InputError(f"plots cannot be written to {folder}: {error.strerror}") from error


def _figure(width: float, height: float, count: int = 1) -> tuple[Figure, Sequence[Axes]]:
    figure = new_figure(width, height)
    axes: Any = figure.subplots(1, count, squeeze=False, sharey=True)[0]
    return figure, axes


def _decades(axis: Axes) -> None:
    """Labels at 1, 2 and 5 of each decade of both axes, in plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for side in (axis.xaxis, axis.yaxis):
        side.set_major_locator(LogLocator(subs=(1, 2, 5)))
        side.set_major_formatter(
            FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
        )
        side.set_minor_formatter(NullFormatter())


def _whole(evaluation: Evaluation, kind: SplitKind) -> list[dict[str, Any]]:
    return [
        r
        for r in evaluation.report["results"]
        if r["split"] == kind and r["labels"] is None and r.get("accuracy")
    ]


def _title(result: dict[str, Any]) -> str:
    return f"{result['estimator']}{' (started)' if result['transferred'] else ''}"


def _scatter(evaluation: Evaluation, kind: SplitKind) -> Figure | None:
    """One panel for each estimator, all seeds together; none where nothing could be judged."""
    results, samples = _whole(evaluation, kind), evaluation.samples
    if not results:
        return None
    figure, axes = _figure(3.2 * len(results) + 0.7, 4.1, len(results))
    unit = UNITS[evaluation.report["metric"]]
    for axis, result in zip(axes, results, strict=True):
        test, estimate = joined(
            [
                run for run in evaluation.runs
                if (run.split, run.labels, run.estimator, run.transferred)
                == (kind, None, result["estimator"], result["transferred"])
            ]
        )  # fmt: skip
        rows = samples.judged[test]
        measured, predicted = samples.values[test][rows], estimate.median[rows]
        ends = [measured.min() * 0.8, measured.max() * 1.25]
        axis.plot(ends, ends, color="0.3", linewidth=0.8)
        axis.fill_between(ends, [0.9 * e for e in ends], [1.1 * e for e in ends], color="0.85")
        axis.scatter(measured, predicted, s=5, alpha=0.35, linewidths=0, color="tab:blue")
        axis.set(
            xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel=f"measured, {unit}",
            title=f"{_title(result)}: {result['accuracy']['mape']:.1f} %", aspect="equal",
        )  # fmt: skip
        _decades(axis)
        axis.title.set_fontsize(10)
    axes[0].set_ylabel(f"predicted, {unit}")
    return figure


def _families(evaluation: Evaluation, kind: SplitKind) -> Figure | None:
    results = _whole(evaluation, kind)
    if not results:
        return None
    counts: dict[str, int] = {}
    for result in results:
        for family, errors in result["by_family"].items():
            counts[family] = max(counts.get(family, 0), errors["count"])
    families = sorted(sorted(counts, key=lambda f: -counts[f])[:MAX_FAMILIES], reverse=True)
    figure, (axis,) = _figure(7, 1.2 + 0.075 * (len(results) + 1.5) * len(families))
    height = 0.85 / len(results)
    for place, result in enumerate(results):
        errors = [result["by_family"].get(f, {}).get("mape", np.nan) for f in families]
        at = np.arange(len(families)) + 0.4 - (place + 0.5) * height
        axis.barh(at, errors, height, label=_title(result))
    axis.set_yticks(range(len(families)), families)
    axis.set(xscale="log", xlabel="mean absolute percentage error")
    axis.margins(y=0.01)
    axis.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False)
    return figure


def _embeddings(evaluation: Evaluation) -> Figure | None:
    """The encoder's embeddings in two dimensions, one point for each architecture."""
    placed = embeddings(evaluation)
    if placed is None or len(placed[1]) < LEAST_POINTS:
        return None
    points = projected(placed[0], np.random.default_rng(evaluation.report["seeds"][0]))
    families = np.array(placed[1])
    names, counts = np.unique(families, return_counts=True)
    largest = names[np.argsort(-counts, kind="stable")][:MAX_FAMILIES].tolist()
    from matplotlib import colormaps

    figure, (axis,) = _figure(8, 5.5)
    others = ~np.isin(families, largest)
    x, y = points.T
    axis.scatter(x[others], y[others], s=10, color="0.85", linewidths=0, label="others")
    for place, family in enumerate(sorted(largest)):
        axis.scatter(
            x[families == family], y[families == family], s=16, linewidths=0,
            color=colormaps["tab20"](place % 20), label=family,
        )  # fmt: skip
    axis.set(xticks=[], yticks=[], title="t-SNE of the embeddings, by family")
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return figure


def _curves(evaluation: Evaluation, kind: SplitKind) -> Figure | None:
    """The error from few labels to all."""
    results = [r for r in evaluation.report["results"] if r["split"] == kind and r.get("accuracy")]
    if all(r["labels"] is None for r in results):
        return None
    runs = [run for run in evaluation.runs if run.split == kind]
    tested = float(np.mean([len(run.test) for run in runs]))
    everything = round(len(evaluation.samples) - tested)
    figure, (axis,) = _figure(6.5, 4)
    for title in dict.fromkeys(map(_title, results)):
        points = sorted(
            (
                everything if r["labels"] is None else r["labels"],
                r["accuracy"]["mape"],
                r.get("accuracy_deviation", {}).get("mape") or 0.0,
            )
            for r in results
            if _title(r) == title
        )
        counts, errors, spread = zip(*points, strict=True)
        axis.errorbar(counts, errors, spread, marker="o", markersize=4, capsize=2, label=title)
    axis.set(xscale="log", yscale="log", xlabel="labels", ylabel="mean absolute percentage error")
    _decades(axis)
    axis.legend(fontsize=8, frameon=False)
    return figure


def _reliability(evaluation: Evaluation, kind: SplitKind) -> Figure | None:
    """What intervals cover against what they should: on the diagonal they keep their word."""
    results = [
        r for r in evaluation.report["results"] if r["split"] == kind and r.get("reliability")
    ]
    if not results:
        return None
    figure, (axis,) = _figure(4.6, 4.4)
    axis.plot([0, 100], [0, 100], color="0.3", linewidth=0.8)
    for result in results:
        covered = result["reliability"]
        labels = "" if result["labels"] is None else f", {result['labels']} labels"
        nominal = [float(name) for name in covered]
        axis.plot(
            nominal, list(covered.values()), marker="o", markersize=4,
            label=f"{_title(result)}{labels}",
        )  # fmt: skip
    axis.set(
        xlim=(0, 100), ylim=(0, 100), aspect="equal",
        xlabel="interval, %", ylabel="of the measurements inside, %",
    )  # fmt: skip
    axis.legend(fontsize=8, frameon=False)
    return figure


def projected(
    embeddings: npt.NDArray[np.float32], generator: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Embeddings (n, width) in two dimensions (n, 2), by t-SNE (van der Maaten and Hinton 2008).

    Columns are scaled first: sums over nodes differ by orders of magnitude.

    Raises:
        InputError: scikit-learn is not installed.
    """
    with from_extra("evaluate", "a map of embeddings"):
        from sklearn.manifold import TSNE

    spread = embeddings.std(axis=0)
    scaled = (embeddings - embeddings.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    tsne = TSNE(
        perplexity=min(30.0, (len(embeddings) - 1) / 3),
        init="pca",
        random_state=int(generator.integers(2**31)),
    )
    points: npt.NDArray[np.float64] = tsne.fit_transform(scaled)
    return points
