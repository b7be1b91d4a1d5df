"""Predictions on the terminal: one in full, or many side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from trappm.prediction.comparison import best_models, cheapest_usd, verdicts
from trappm.prediction.costs import prices_of
from trappm.prediction.estimate import beside_step_mib
from trappm.prediction.prediction import CONTEXT
from trappm.profiler.records import Phase, is_cpu_device
from trappm.terminal.tables import cell, console, print_line, print_table, table

if TYPE_CHECKING:
    from trappm.prediction.costs import Run
    from trappm.prediction.prediction import Prediction


def print_prediction(prediction: Prediction, source: Sequence[str] = ()) -> None:
    """The answer in a sentence and in full, what it rests on, and what it lacks.

    Lines about its source stand below the sentence.
    """
    out = console()
    print_line(str(prediction))
    for line in source:
        print_line(line, style="dim")
    print_line(
        f"{_step(prediction)} on {prediction.device}, batch {prediction.batch_size}, "
        f"in {_settings(prediction)}:"
    )
    rows = prediction.figures()
    if rows:
        out.print(table("", ("metric", "prediction", "unit", "90 % spread"), rows))
    for line in (*prediction.gaps(), *_what_fits(prediction), *_about_power(prediction)):
        print_line(line)
    if prediction.run is not None:
        _print_run(prediction.run, prediction.device)
    elif "run" in prediction.missing:
        print_line(f"the whole run is not known: {prediction.missing['run']}")
    for remark in prediction.remarks:
        print_line(remark)
    memory = _memory(prediction)
    if memory is not None:
        print_line(memory)
    out.print(f"snapshot {prediction.snapshot}", style="dim")


def print_comparison(predictions: Sequence[Prediction]) -> None:
    """Which device, and which model, is best at what; then all answers as one table."""
    _print_best(predictions)
    run = any(prediction.run is not None for prediction in predictions)
    columns = (
        "model", "device", "batch", "precision", "step, ms", "USD, run" if run else "USD, 1M",
        "MiB", "P(OOM)", "1/s", "safe batch",
    )  # fmt: skip
    rows = [
        (
            prediction.model,
            prediction.device,
            prediction.batch_size,
            prediction.precision,
            prediction.step_time_ms,
            cheapest_usd(prediction),
            prediction.memory_mib,
            None if prediction.out_of_memory is None else f"{prediction.out_of_memory:.1%}",
            prediction.samples_per_s,
            None if (batch := prediction.largest_batch_size) is None else float(batch),
        )
        for prediction in predictions
    ]
    # What all have in common is said once, above: the table is to fit 80 columns.
    common = [name for name in _COMMON if len({row[columns.index(name)] for row in rows}) == 1]
    title = ", ".join(_COMMON[name].format(rows[0][columns.index(name)]) for name in common)
    kept = [place for place, name in enumerate(columns) if name not in common]
    print_table(
        title, [columns[place] for place in kept], [[row[place] for place in kept] for row in rows]
    )
    gaps = {
        f"{prediction.device}: {why}"
        for prediction in predictions
        for why in prediction.missing.values()
    }
    for gap in sorted(gap for gap in gaps if "has no" in gap):
        console().print(gap, style="dim", markup=False)
    for remark in _remarks(predictions):
        console().print(remark, style="dim", markup=False)
    used = dict.fromkeys(prediction.snapshot for prediction in predictions)
    console().print(f"snapshot {', '.join(used)}", style="dim")


def _print_best(predictions: Sequence[Prediction]) -> None:
    """The answer first: the best of all models, then for each model its best devices."""
    for what, best_of_all in best_models(predictions).items():
        print_line(f"{what.capitalize()}: {best_of_all.model} on {_at(best_of_all, what)}.")
    for model, best in verdicts(predictions).items():
        winners = ", ".join(f"{what}: {device}" for what, device in best.items() if device)
        if winners:
            print_line(f"{model}: {winners}")
    if len({prediction.precision for prediction in predictions}) > 1:
        print_line("precisions differ, as those of most labels do; --precision compares in one")
    cards = dict.fromkeys(p.device for p in predictions if not is_cpu_device(p.device))
    unpriced = [card for card in cards if not prices_of(card)]
    if unpriced:
        print_line(_no_price(unpriced))


def _at(prediction: Prediction, what: str) -> str:
    """The device, and the figure by which it is the best."""
    if what == "fastest":
        return f"{prediction.device}, {cell(prediction.samples_per_s)} samples/s"
    run = prediction.run
    work = "a million samples" if run is None else f"for {run.length}"
    return f"{prediction.device}, {cell(cheapest_usd(prediction))} USD {work}"


def _no_price(devices: Iterable[str]) -> str:
    return f"no price of {', '.join(devices)} is known; add one to prices.yaml in TRAPPM_HOME"


_COMMON = {"model": "{}", "batch": "batch {}", "precision": "{}"}
"""Columns that are left out where they say the same everywhere, and how the title says it."""


def _remarks(predictions: Sequence[Prediction]) -> list[str]:
    """Each remark once, with what it is about where it neither says so nor is about all."""
    by_remark: dict[str, list[Prediction]] = {}
    for prediction in predictions:
        for remark in prediction.remarks:
            by_remark.setdefault(remark, []).append(prediction)
    lines = []
    for remark, concerned in by_remark.items():
        devices = dict.fromkeys(p.device for p in concerned)
        of_them = [p for p in predictions if p.device in devices]
        models = dict.fromkeys(p.model for p in concerned) if len(concerned) < len(of_them) else ()
        named = all(device in remark for device in devices) or len(concerned) == len(predictions)
        about = ", ".join([*models, *(() if named else devices)])
        lines.append(f"{about}: {remark}" if about else remark)
    return lines


def _memory(prediction: Prediction) -> str | None:
    """What the memory of the step is made of on a GPU, and what stands beside it there."""
    memory = prediction.simulated_memory
    if memory is None:
        return None
    parts = [f"{memory.live_mib:,.0f} MiB of tensors"]
    parts += [f"{memory.reserved_mib - memory.live_mib:,.0f} held by the allocator beside them"]
    scratch_mib = memory.reserved_with_workspace_mib - memory.reserved_mib
    if round(scratch_mib) > 0:
        parts.append(f"{scratch_mib:,.0f} workspace of convolutions")
    rest_mib = prediction.memory_parts_mib.get(CONTEXT)
    beside = f"{CONTEXT} come beside it"
    if rest_mib is not None:
        of_all = f"of {prediction.memory_mib:,.0f} MiB"
        beside = f"the other {rest_mib:,.0f} {of_all} are {CONTEXT}"
        usual_mib = beside_step_mib(prediction.device, Phase(prediction.phase))
        more_mib = round(rest_mib - usual_mib)
        if more_mib:
            which = "more" if more_mib > 0 else "less"
            beside += f": {usual_mib:,.0f}, and {abs(more_mib):,} {which} by labels"
        if rest_mib < 0:
            beside = f"labels show {-rest_mib:,.0f} less"
    return (
        f"simulated on CUDA, {_settings(prediction)} ({prediction.memory_source}): "
        f"{' + '.join(parts)}; {beside}"
    )


def _what_fits(prediction: Prediction) -> list[str]:
    lines = []
    if prediction.out_of_memory is not None:
        risk = (
            f"P(out of memory) {prediction.out_of_memory:.1%} of {prediction.capacity_mib:,.0f} MiB"
        )
        safe = prediction.largest_batch_size
        if safe is not None:
            risk += (
                f"; largest safe batch: {safe:,}, whose upper bound fits (by simulation alone: "
                "trappm fits)"
            )
        lines.append(risk)
    if prediction.mig_profile is not None:
        lines.append(f"smallest MIG profile: {prediction.mig_profile}")
    return lines


def _about_power(prediction: Prediction) -> list[str]:
    lines = []
    if prediction.power_source is not None:
        limit = prediction.power_limit_w
        under = "" if limit is None else f", under a limit of {limit:g} W"
        lines.append(f"power{under} rests on: {prediction.power_source}")
    thrift = prediction.thriftiest
    if thrift is not None and thrift.saved > 0:
        lines.append(
            f"thriftiest power limit for 5 % of time: {thrift.power_limit_w:g} W, "
            f"{cell(thrift.step_time_ms)} ms, {cell(thrift.energy_j)} J "
            f"({thrift.saved:.0%} less than as delivered)"
        )
    return lines


def _print_run(run: Run, device: str) -> None:
    print_line(
        f"{run.length} of {run.samples:,} samples: {run.steps:,} steps, {cell(run.hours)} h "
        f"({cell(run.low_hours)} to {cell(run.high_hours)})"
    )
    rows: list[tuple[Any, ...]] = [
        (x.cloud, x.usd, f"{cell(x.low_usd)} to {cell(x.high_usd)}", x.usd_per_hour, x.noted)
        for x in run.offers
    ]
    if rows:
        print_table("", ("cloud", "USD", "90 % spread", "USD an hour", "noted"), rows)
    elif not is_cpu_device(device):
        print_line(_no_price([device]))
    if run.energy_kwh is not None:
        carbon = "" if run.co2_kg is None else f", {cell(run.co2_kg)} kg CO2"
        print_line(f"energy {cell(run.energy_kwh)} kWh{carbon}")


def _step(prediction: Prediction) -> str:
    what = "A training" if prediction.phase == "train" else "An inference"
    return f"{what} step of {prediction.model}"


def _settings(prediction: Prediction) -> str:
    return ", ".join((prediction.precision, prediction.memory_format, prediction.optimizer))
