"""Steps on many GPUs on the terminal: one in full, or a table and a curve over their number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trappm.terminal.tables import console, print_line, print_table

if TYPE_CHECKING:
    from trappm.prediction.parallel.parallel_prediction import ParallelPrediction


def print_parallel(prediction: ParallelPrediction) -> None:
    """The answer in a sentence, where its time goes, and what a GPU's memory holds."""
    print_line(str(prediction))
    passes = f", {prediction.accumulation} passes" if prediction.accumulation > 1 else ""
    print_line(
        f"{prediction.model}, {prediction.strategy}, batch {prediction.batch_size} a GPU{passes}, "
        f"{prediction.precision}, {prediction.optimizer}; {prediction.links}."
    )
    rows: list[tuple[str, float, str]] = [
        ("step", prediction.step_time_ms, "ms"),
        ("  compute", prediction.compute_ms, "ms"),
        ("  communication exposed", prediction.exposed_ms, "ms"),
        ("communication, hidden as well", prediction.communication_ms, "ms"),
    ]
    if prediction.memory_mib is not None:
        rows.append(("memory of a GPU", prediction.memory_mib, "MiB"))
        rows += [(f"  {name}", size, "MiB") for name, size in prediction.memory_parts_mib.items()]
    if prediction.usd_per_million is not None:
        rows.append(("a million samples", prediction.usd_per_million, "USD"))
    print_table("", ("part", "median", "unit"), rows)
    for remark in prediction.remarks:
        print_line(remark, style="dim")
    console().print(f"snapshot {prediction.snapshot}", style="dim")


def print_scaling(predictions: Sequence[ParallelPrediction], refusals: Sequence[str]) -> None:
    """Which is fastest and cheapest, all of them, and a curve of samples a second."""
    fitting = [p for p in predictions if p.fits is not False]
    if fitting:
        fastest = max(fitting, key=lambda p: p.samples_per_s)
        print_line(f"Fastest: {_named(fastest)}, {fastest.samples_per_s:,.0f} samples/s.")
        priced = [(p.usd_per_million, p) for p in fitting if p.usd_per_million is not None]
        if priced:
            usd, cheapest = min(priced, key=lambda pair: pair[0])
            print_line(f"Cheapest: {_named(cheapest)}, {usd:.2f} USD a million samples.")
    else:
        print_line("None of these fits.")
    columns = ("strategy", "GPUs", "step, ms", "samples/s", "times one", "GiB", "fits", "USD, 1M")
    rows = [
        (
            p.strategy,
            p.ranks,
            p.step_time_ms,
            p.samples_per_s,
            f"{p.speedup:.1f}",
            None if p.memory_mib is None else f"{p.memory_mib / 1024:.1f}",
            None if p.fits is None else ("yes" if p.fits else "no"),
            p.usd_per_million,
        )
        for p in predictions
    ]
    print_table("", columns, rows)
    if len({p.ranks for p in predictions}) > 1:
        console().print(_curve(predictions), markup=False, soft_wrap=True)
    for line in (*refusals, *predictions[0].remarks):
        print_line(line, style="dim")


def _named(prediction: ParallelPrediction) -> str:
    cards = f"{prediction.ranks} GPUs" if prediction.ranks > 1 else "1 GPU"
    return f"{prediction.strategy} on {cards}"


def _curve(predictions: Sequence[ParallelPrediction]) -> str:
    """How many times as fast as one GPU, by their number; dots: as many times."""
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(72, 18)
    most = max(p.ranks for p in predictions)
    plotext.plot([1, most], [1, most], marker="·", label="as many times")
    strategies = dict.fromkeys(p.strategy for p in predictions)
    for marker, strategy in zip("ox+", strategies, strict=False):
        own = [p for p in predictions if p.strategy == strategy]
        plotext.plot(
            [p.ranks for p in own], [p.speedup for p in own], marker=marker, label=strategy
        )
    plotext.xlabel("GPUs")
    plotext.title("times as fast as one GPU")
    return "\n".join(line.rstrip() for line in plotext.uncolorize(plotext.build()).splitlines())
