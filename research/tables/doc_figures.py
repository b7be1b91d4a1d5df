"""Figures of docs/how_it_works.md and docs/research/intervals.md.

Learning curves and coverage come from tables in docs/research/acquisition.md and
docs/research/intervals.md, and errors from the manifest of the shipped snapshot.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import typer

from trappm.profiler.errors import InputError

matplotlib.use("svg")
from matplotlib import pyplot

ROOT = Path(__file__).parents[2]
BUDGETS = (20, 30, 50, 75, 100, 150, 200, 300)
STYLES = {
    "ours": {"color": "#0b5cad", "linewidth": 2.5, "marker": "o"},
    "bmdal-lcmd-gradients": {"color": "#0f766e", "marker": "s"},
    "random": {"color": "#667788", "linestyle": "--", "marker": "^"},
}
SETTINGS = {"svg.hashsalt": "trappm", "svg.fonttype": "none", "font.size": 10}
"""Metadata without dates, so that unchanged figures have identical bytes."""


def curves(text: str, heading: str) -> dict[str, list[float]]:
    """Return the first number of each cell, by strategy, of the table under a heading."""
    rows = text.split(f"\n{heading}", 1)[1].split("\n\n", 2)[1].splitlines()
    errors = {}
    for row in rows:
        cells = [cell.strip() for cell in row.strip("| ").split("|")]
        name = cells[0].strip("`")
        if name in STYLES:
            values = [re.match(r"[\d.]+", cell) for cell in cells[2 : 2 + len(BUDGETS)]]
            errors[name] = [float(value[0]) for value in values if value]
    if not errors:
        raise InputError(f"the page has no table of strategies under {heading!r}")
    return errors


def draw_curves(folder: Path) -> None:
    text = (ROOT / "docs/research/acquisition.md").read_text()
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4))
    for place, heading, title in (
        (axes[0], "Step time (", "Step time, RTX 3090 training"),
        (axes[1], "Memory (", "Memory, A100 training"),
    ):
        for name, errors in sorted(curves(text, heading).items()):
            place.plot(BUDGETS, errors, label=name, markersize=4, **STYLES[name])
        place.set_xscale("log")
        place.set_xticks(BUDGETS, [str(b) for b in BUDGETS])
        place.minorticks_off()
        place.set(title=title, xlabel="labels", ylabel="MAPE on held-out architectures, %")
        place.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    save(figure, folder / "learning_curves.svg")


def draw_errors(folder: Path) -> None:
    manifest = json.loads((ROOT / "trappm/shipped_snapshot/manifest.json").read_text())
    heads = [
        (f"{device}, {phase}\n{metric}", of_head)
        for device, phases in manifest["errors"].items()
        for phase, metrics in phases.items()
        for metric, of_head in metrics.items()
    ]
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 2.9), sharey=True)
    at = range(len(heads))
    axes[0].barh(at, [of_head["mape"] for _, of_head in heads], color="#9cc3ea", label="mean")
    axes[0].barh(
        at, [of_head["median_ape"] for _, of_head in heads], 0.4, color="#0b5cad", label="median"
    )
    longest = max(of_head["mape"] for _, of_head in heads)
    axes[0].set(xlabel="absolute error on held-out architectures, %", xlim=(0, 1.3 * longest))
    axes[0].set_yticks(at, [name for name, _ in heads])
    axes[0].legend(frameon=False)
    axes[1].plot([of_head["coverage"] for _, of_head in heads], at, "o", color="#0b5cad")
    axes[1].axvline(90, color="#667788", linestyle="--")
    axes[1].set(xlabel="held-out labels inside the 90 % interval, %", xlim=(80, 100))
    axes[1].grid(alpha=0.3)
    save(figure, folder / "shipped_errors.svg")


def save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)


def draw_reliability(folder: Path) -> None:
    text = (ROOT / "docs/research/intervals.md").read_text()
    table = text.split("\nCoverage of intervals of each size, in %:\n\n", 1)[1].split("\n\n", 1)[0]
    head, _, *rows = ([cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines())
    nominal = [float(cell) for cell in head[1:]]
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 4.4), sharey=True)
    for axes, metric in zip(panels, ("step time", "memory"), strict=True):
        axes.plot([0, 100], [0, 100], color="#667788", linewidth=0.8)
        for name, *covered in rows:
            of, _, split = name.partition(", ")
            if of == metric:
                values = [float(cell) for cell in covered]
                axes.plot(nominal, values, marker="o", markersize=3, label=split)
        axes.set(xlim=(0, 100), ylim=(0, 100), aspect="equal", title=metric, xlabel="interval, %")
        axes.grid(alpha=0.3)
    panels[0].set(ylabel="of the measurements inside, %")
    panels[0].legend(frameon=False, fontsize="small")
    save(figure, folder / "reliability.svg")


def main(
    folder: Annotated[Path, typer.Option("--to", help="Folder to write the figures to.")] = ROOT
    / "docs/figures",
) -> None:
    """Draw all figures."""
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(SETTINGS):
        draw_curves(folder)
        draw_errors(folder)
        draw_reliability(folder)
    print(*sorted(folder.glob("*.svg")), sep="\n")
