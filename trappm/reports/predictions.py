"""Predictions on the terminal: one in full, or many side by side."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from trappm.prediction.comparison import FAR_REASON, best_models, cheapest_usd, verdicts
from trappm.prediction.cost import prices_of
from trappm.prediction.fit import VERDICTS
from trappm.prediction.prediction import LOADING_REMARK
from trappm.prediction.selection import ONLY_MEASURED
from trappm.profiler.devices.catalogue import rank_key, read_name
from trappm.profiler.errors import InputError
from trappm.profiler.records import is_cpu_device
from trappm.terminal.tables import cell, print_line, print_notes, print_table

if TYPE_CHECKING:
    from trappm.prediction.comparison import Payoff
    from trappm.prediction.cost import Run
    from trappm.prediction.prediction import Prediction


MAX_COMMENT = 78
"""Width of a comment in a script."""
CAN_BE_SHOWN = {FAR_REASON, *ONLY_MEASURED.values()}
"""Reasons that leave a device out of comparisons, unless it is named."""


def print_prediction(prediction: Prediction, *, explain: bool = False) -> None:
    """Print the answer in sentences and in full, and its remarks; all of them with `explain`."""
    print_line(str(prediction))
    if prediction.measured is not None:
        print_line(f"{prediction.measured}.")
    rows = prediction.figures()
    if rows:
        print_table("", ("metric", "prediction", "unit", "90 % interval"), rows)
    if prediction.largest_batch:
        print_line(f"Largest batch that fits: {prediction.largest_batch:,}")
    elif prediction.largest_batch is not None:
        print_line(f"Not even batch 1 fits {prediction.device_name}.")
    if prediction.run is not None:
        _print_run(prediction.run, prediction.device)
    print_notes(_notes(prediction), explain=explain)


def print_breakdown(prediction: Prediction, depth: int) -> None:
    """Print the memory at its peak by parts, modules (levels to `depth`) and largest tensors."""
    breakdown = prediction.memory_breakdown
    total_mib = breakdown.total_mib

    def row(name: str, size_mib: float) -> tuple[str, float, str]:
        return name, float(round(size_mib)), f"{size_mib / total_mib:.0%}"

    print_line(f"\nMemory at its peak, in {breakdown.moment}", style="bold")
    parts = sorted(breakdown.parts_mib.items(), key=lambda item: -item[1])
    print_table("", ("part", "MiB", "share"), [row(part.value, size) for part, size in parts])
    modules = [
        row(module.name, module.size_mib)
        for module in breakdown.modules.walk(depth)
        if module.size_mib >= total_mib / 200
    ]
    if modules:
        print_table("Activations by module", ("module", "MiB", "share"), modules)
    largest = [
        (float(round(x.size_mib)), x.origin.module, x.origin.operator.lstrip("_"),
         x.origin.line.rpartition("/")[2])
        for x in breakdown.largest
    ]  # fmt: skip
    print_table("Largest tensors", ("MiB", "module", "operator", "line"), largest)


def print_slurm(prediction: Prediction) -> None:
    """Print the directives of a Slurm script for the run; its time is the upper bound.

    Raises:
        InputError: The device is no GPU, or the run is not predicted.
    """
    if is_cpu_device(prediction.device):
        raise InputError(f"--slurm is for GPUs, not {prediction.device}; name one, such as a100")
    if prediction.run is None:
        reason = prediction.missing.get("run", "add --epochs and --samples")
        raise InputError(f"--slurm needs the length of a run: {reason}")
    key = rank_key(prediction.device)
    card = read_name(key.member if prediction.card is None else prediction.card)
    kind = "_".join(filter(None, (card.model.replace("-", "_"), card.part)))
    minutes = math.ceil(60 * prediction.run.high_hours)
    days, minutes = divmod(minutes, 24 * 60)
    print_line(f"#SBATCH --job-name={prediction.model.replace(':', '-').replace(',', '-')}")
    print_line(f"#SBATCH --gres=gpu:{kind}:{key.ranks}")
    print_line(f"#SBATCH --time={days}-{minutes // 60:02}:{minutes % 60:02}:00")
    about = f"{prediction} Memory of the host is not predicted; add --mem."
    for line in textwrap.wrap(about, width=MAX_COMMENT):
        print_line(f"# {line}")


def _notes(prediction: Prediction) -> list[str]:
    """Return what the answer lacks, its remarks, and what it is based on, in this order."""
    notes = prediction.gaps()
    if "run" in prediction.missing:
        notes.append(f"No cost of the whole run: {prediction.missing['run']}.")
    notes += [*prediction.remarks, *_about_power(prediction)]
    if prediction.out_of_memory is not None:
        notes.append(f"Probability of running out of memory: {prediction.out_of_memory:.0%}")
    if prediction.mig_profile is not None:
        notes.append(f"Smallest MIG profile: {prediction.mig_profile}")
    if (memory := _memory(prediction)) is not None:
        notes.append(memory)
    settings = (
        prediction.phase,
        prediction.precision,
        prediction.memory_format,
        prediction.optimizer,
    )
    notes.append(f"Settings: {', '.join(settings)}")
    return notes if prediction.snapshot is None else [*notes, f"Snapshot: {prediction.snapshot}"]


def print_comparison(
    predictions: Sequence[Prediction],
    left_out: Sequence[Mapping[str, str]] = (),
    compiling: Sequence[Payoff] = (),
    *,
    explain: bool = False,
) -> None:
    """Print the best devices and models, all answers as one table, and their remarks.

    Args:
        predictions: The answers.
        left_out: Device and reason of each that was not compared.
        compiling: When compiling pays.
        explain: Print all remarks.
    """
    _print_best(predictions)
    run = any(prediction.run is not None for prediction in predictions)
    columns = (
        "model", "device", "batch", "precision", "run", "step, ms",
        "USD, run" if run else "USD, 1M", "MiB", "fits", "1/s", "largest batch",
    )  # fmt: skip
    rows = [
        (
            prediction.model,
            prediction.device,
            prediction.batch_size,
            prediction.precision,
            prediction.execution,
            prediction.step_time_ms,
            cheapest_usd(prediction),
            prediction.memory_mib,
            None if prediction.verdict is None else VERDICTS[prediction.verdict],
            prediction.samples_per_s,
            None if (batch := prediction.largest_batch) is None else float(batch),
        )
        for prediction in predictions
    ]
    # Columns with one value become the title, so that the table fits 80 characters.
    common = [at for at in range(5) if len({row[at] for row in rows}) == 1]
    title = [
        f"batch {rows[0][at]}" if columns[at] == "batch" else str(rows[0][at])
        for at in common if columns[at] != "run"
    ]  # fmt: skip
    lengths = {p.sequence_length for p in predictions} - {None}
    title += [f"{length:,} tokens" for length in lengths if len(lengths) == 1]
    kept = [at for at in range(len(columns)) if at not in common]
    shown = [[row[at] for at in kept] for row in rows]
    print_table(", ".join(title), [columns[at] for at in kept], shown)
    for model, device, compile_s, steps in compiling:
        pays = "never pays" if steps is None else f"pays after {steps:,} steps"
        print_line(f"{model} on {device}: compiling took {cell(compile_s)} s and {pays}.")
    print_notes(_notes_on_all(predictions, left_out), explain=explain)


def print_settings(predictions: Sequence[Prediction], *, explain: bool = False) -> None:
    """Print the best setting that fits, all of them as one table, and a plot of the speed.

    Args:
        predictions: Answers that differ by batch size and precision only.
        explain: Print all remarks.
    """
    from trappm.terminal.plots import curves

    precisions = {p.precision for p in predictions}
    speeds = [(p.samples_per_s, p) for p in predictions if p.samples_per_s is not None]
    fitting = [(speed, p) for speed, p in speeds if p.fits]
    if fitting:
        speed, best = max(fitting, key=itemgetter(0))
        setting = f"batch {best.batch_size:,}"
        if len(precisions) > 1:
            setting += f" in {best.precision}"
        print_line(f"Fastest that fits: {setting}, {cell(speed)} samples/s.")
    print_comparison(predictions, explain=explain)
    points = sorted((float(p.batch_size), speed) for speed, p in speeds)
    if len(points) > 1 and len(precisions) == 1:
        print_line(curves({"": points}, title="Speed", x_label="batch size", y_label="samples/s"))


def _notes_on_all(
    predictions: Sequence[Prediction], left_out: Sequence[Mapping[str, str]]
) -> list[str]:
    """Return what was left out, what cannot be compared, and the remarks, in this order."""
    notes = []
    reasons: dict[str, dict[str, None]] = {}
    for row in left_out:
        reasons.setdefault(row["reason"], {})[row["device"]] = None
    for reason, devices in reasons.items():
        named = " ".join(f"--device {device}" for device in devices)
        see = f"; show with {named}" if reason in CAN_BE_SHOWN else ""
        notes.append(f"Left out: {', '.join(devices)} ({reason}){see}.")
    precisions: dict[str, set[str]] = {}
    for prediction in predictions:
        precisions.setdefault(prediction.device, set()).add(prediction.precision)
    if any(used != precisions[predictions[0].device] for used in precisions.values()):
        notes.append("Precisions differ between devices; compare in one with --precision.")
    unpriced = [card for card, is_priced in _find_priced(predictions).items() if not is_priced]
    if unpriced:
        notes.append(_no_price(unpriced))
    gaps = sorted({f"{p.device}: {gap}" for p in predictions for gap in p.gaps()})
    used = dict.fromkeys(p.snapshot for p in predictions if p.snapshot is not None)
    return [*notes, *_remarks(predictions), *gaps, f"Snapshot: {', '.join(used)}"]


def _print_best(predictions: Sequence[Prediction]) -> None:
    """Print the best of all models, then the best devices of each model."""
    priced = _find_priced(predictions).values()
    known = "" if all(priced) else f" (prices known: {sum(priced)} of {len(priced)} GPUs)"
    for what, p in best_models(predictions).items():
        figure = f"{cell(p.samples_per_s)} samples/s"
        if what == "cheapest":
            work = "a million samples" if p.run is None else f"for {p.run.length}"
            figure = f"{cell(cheapest_usd(p))} USD {work}{known}"
        print_line(f"{what.capitalize()}: {p.model} on {p.device}, {figure}.")
    for model, best in verdicts(predictions).items():
        winners = ", ".join(
            f"{what.replace('_', ' ')}: {device}{known if what == 'cheapest' else ''}"
            for what, device in best.items()
            if device
        )
        if winners:
            print_line(f"{model}: {winners}")


def _find_priced(predictions: Sequence[Prediction]) -> dict[str, bool]:
    """Return whether a price is known, by GPU."""
    gpus = [p for p in predictions if not is_cpu_device(p.device)]
    return {p.device: bool(prices_of(p.device, p.usd_per_hour, p.card)) for p in gpus}


def _no_price(devices: Iterable[str]) -> str:
    return f"No price is known for {', '.join(devices)}; add one to prices.yaml in TRAPPM_HOME."


def _remarks(predictions: Sequence[Prediction]) -> list[str]:
    """Return each remark once, with what it is about unless it names that or is about all.

    That is models and devices, or settings of one model on one device.
    """
    is_one_model = len({(p.model, p.device) for p in predictions}) == 1
    by_remark: dict[str, list[Prediction]] = {}
    for prediction in predictions:
        for remark in prediction.remarks:
            by_remark.setdefault(remark, []).append(prediction)
    lines = []
    for remark, concerned in by_remark.items():
        if is_one_model:
            settings = dict.fromkeys(f"{p.precision}, batch {p.batch_size:,}" for p in concerned)
            if {p.precision for p in concerned} != {p.precision for p in predictions}:
                settings = dict.fromkeys(p.precision for p in concerned)
            about = "; ".join(settings) if len(concerned) < len(predictions) else ""
            lines.append(f"{about}: {remark}" if about else remark)
            continue
        devices = dict.fromkeys(p.device for p in concerned)
        of_them = [p for p in predictions if p.device in devices]
        models = dict.fromkeys(p.model for p in concerned) if len(concerned) < len(of_them) else ()
        named = all(p.device_name in remark for p in concerned)
        named = named or len(concerned) == len(predictions)
        about = ", ".join([*models, *(() if named else devices)])
        lines.append(f"{about}: {remark}" if about else remark)
    return lines


def _memory(prediction: Prediction) -> str | None:
    """Return the parts of the step's memory on a GPU; None if the step was not simulated."""
    memory = prediction.simulated_memory
    if memory is None:
        return None
    parts = [
        f"tensors {memory.live_mib:,.0f} MiB",
        f"allocator {memory.reserved_mib - memory.live_mib:,.0f}",
    ]
    scratch_mib = memory.reserved_with_workspace_mib - memory.reserved_mib
    if round(scratch_mib) > 0:
        parts.append(f"convolution workspace {scratch_mib:,.0f}")
    rest_mib = prediction.memory_parts_mib.get("context_and_libraries")
    if rest_mib is not None:
        parts.append(f"CUDA context, libraries and what labels add {rest_mib:,.0f}")
    text = f"Memory by simulation ({prediction.memory_source}): {', '.join(parts)}"
    reserved_mib = prediction.reserved_mib
    if reserved_mib is not None:
        text += f"; PyTorch reserves {reserved_mib:,.0f}"
    return text


def _about_power(prediction: Prediction) -> list[str]:
    lines = []
    if prediction.power_source is not None:
        limit = prediction.power_limit_w
        under = "" if limit is None else f", under a limit of {limit:g} W"
        lines.append(f"Power{under} is based on: {prediction.power_source}")
    best = prediction.best_power_limit
    if best is not None and best.saved > 0:
        lines.append(
            f"Best power limit within 5 % of full speed: {best.power_limit_w:g} W, "
            f"{cell(best.step_time_ms)} ms, {cell(best.energy_j)} J "
            f"({best.saved:.0%} less than at the factory setting)"
        )
    return lines


def _print_run(run: Run, device: str) -> None:
    print_line(
        f"{run.length} of {run.samples:,} samples: {run.steps:,} steps, {cell(run.hours)} h "
        f"({cell(run.low_hours)} to {cell(run.high_hours)}), {LOADING_REMARK}"
    )
    rows: list[tuple[Any, ...]] = [
        (x.cloud, x.usd, f"{cell(x.low_usd)} to {cell(x.high_usd)}", x.usd_per_hour, x.noted)
        for x in run.offers
    ]
    if rows:
        print_table("", ("cloud", "USD", "90 % interval", "USD per hour", "noted"), rows)
    elif not is_cpu_device(device):
        print_line(_no_price([device]))
    if run.energy_kwh is not None:
        carbon = "" if run.co2_kg is None else f", {cell(run.co2_kg)} kg CO2"
        print_line(f"Energy: {cell(run.energy_kwh)} kWh{carbon}")
