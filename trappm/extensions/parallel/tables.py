"""Steps on many GPUs on the terminal: the best ways, and a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trappm.extensions.parallel.scaling import best
from trappm.prediction.fitting import VERDICTS
from trappm.terminal.tables import print_line, print_notes, print_table

if TYPE_CHECKING:
    from trappm.extensions.parallel.shared_step import ParallelPrediction


def print_scaling(
    predictions: Sequence[ParallelPrediction], refusals: Sequence[str], *, explain: bool = False
) -> None:
    """Print for each model the question, which is fastest and cheapest, and a table."""
    models = dict.fromkeys(p.model for p in predictions)
    for model in models:
        own = [p for p in predictions if p.model == model]
        several = len({p.device for p in own}) > 1
        print_line(_question(own[0], several=several))
        _print_best(own, several=several)
        columns = ["strategy", "GPUs", "step, ms", "samples/s", "times one", "GiB", "fits"]
        rows = [
            [
                *([p.device] if several else []),
                p.strategy,
                p.ranks,
                p.step_time_ms,
                p.samples_per_s,
                f"{p.speedup:.1f}",
                None if p.memory_mib is None else f"{p.memory_mib / 1024:.1f}",
                None if p.verdict is None else VERDICTS[p.verdict],
                p.usd_per_million,
            ]
            for p in own
        ]
        print_table("", [*(["device"] if several else []), *columns, "USD, 1M"], rows)
    remarks = dict.fromkeys(remark for p in predictions for remark in p.remarks)
    print_notes([*refusals, *remarks], explain=explain)


def _question(p: ParallelPrediction, *, several: bool) -> str:
    """Return what was predicted; without the device if there are several."""
    device = f"{p.device_name} (default)" if p.device_is_default else p.device_name
    subject = p.model if several else f"{p.model} on {device}"
    tokens = "" if p.sequence_length is None else f" and {p.sequence_length:,} tokens"
    passes = f", {p.accumulation} passes" if p.accumulation > 1 else ""
    return f"{subject}, {p.precision}, batch {p.batch_size:,}{tokens} per GPU{passes}."


def _print_best(predictions: Sequence[ParallelPrediction], *, several: bool) -> None:
    chosen = best(predictions)
    if not chosen:
        print_line("None of these fits.")
    for what, p in chosen.items():
        cards = f" {p.device}" if several else " GPU" if p.ranks == 1 else " GPUs"
        figure = f"{p.samples_per_s:,.0f} samples/s"
        if what == "cheapest":
            figure = f"{p.usd_per_million:.2f} USD a million samples"
        print_line(f"{what.capitalize()}: {p.strategy} on {p.ranks}{cards}, {figure}.")
