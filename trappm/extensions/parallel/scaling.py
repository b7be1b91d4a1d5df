"""Strategies and numbers of GPUs side by side: which is fastest, which cheapest, which fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trappm.extensions.parallel.shared_step import ParallelPrediction, SharedStep
from trappm.extensions.parallel.strategy import Parallelism, Strategy
from trappm.prediction.fitting import VERDICTS, Verdict
from trappm.prediction.question import Question
from trappm.profiler.devices.base import rank_key
from trappm.profiler.errors import InputError, UnsupportedModelError
from trappm.profiler.records import Phase, member
from trappm.terminal.tables import print_line, print_notes, print_table

if TYPE_CHECKING:
    from trappm.prediction.models.subjects import Subject

Scaling = tuple[list[ParallelPrediction], list[str]]
"""All that can be, and why the rest cannot: a line each."""


def scaling(
    models: Sequence[str | Subject],
    devices: Sequence[str] | None,
    counts: Sequence[int],
    strategies: Sequence[str] = (),
    *,
    accumulation: int = 1,
    gpus_per_node: int | None = None,
    network_gbit: float | None = None,
    **question: Any,
) -> Scaling:
    """Predicts models on devices with all strategies and numbers of GPUs that they can have.

    Args:
        models: Timm names, transformers, paths of ONNX files, or profiled models.
        devices: Devices by any of their names, or `all` GPUs; `DEFAULT_DEVICE` by default.
        counts: GPUs in all; more than a node has are spread over nodes.
        strategies: by default all.
        accumulation: passes before each optimizer step.
        gpus_per_node: by default of the usual node of a card.
        network_gbit: of a node's network; by default that of the usual node.
        **question: as for `SharedStep.of`.

    Raises:
        InputError: there is nothing that could be shared so, and why.
        TrappmError: as `predict`.
    """
    chosen = [member("strategy", Strategy, name) for name in strategies or Strategy]
    predictions, refusals = list[ParallelPrediction](), dict[str, None]()
    cards = _devices(devices, question.get("snapshot"))
    for model in models:
        for device in cards:
            try:
                step = SharedStep.of(model, device, **question)
            except (InputError, UnsupportedModelError) as error:
                if len(models) == len(cards) == 1:
                    raise
                refusals[str(error)] = None
                continue
            per_node = gpus_per_node or step.node.gpus
            for strategy in chosen:
                for count in counts:
                    try:
                        parallelism = _spread(strategy, count, per_node, accumulation)
                        predictions.append(step.on(parallelism, network_gbit))
                    except InputError as error:
                        refusals[str(error)] = None
    if not predictions:
        raise InputError(next(iter(refusals), "no number of GPUs is given; add --gpus 1,2,4,8"))
    return predictions, list(refusals)


def best(predictions: Sequence[ParallelPrediction]) -> dict[str, ParallelPrediction]:
    """Of one model: the `fastest`, and the `cheapest` by known prices, of those that may fit."""
    fitting = [p for p in predictions if p.verdict is not Verdict.DOES_NOT_FIT]
    priced = [(p.usd_per_million, p) for p in fitting if p.usd_per_million is not None]
    chosen = {}
    if fitting:
        chosen["fastest"] = max(fitting, key=lambda p: p.samples_per_s)
    if priced:
        chosen["cheapest"] = min(priced, key=lambda pair: pair[0])[1]
    return chosen


def scaling_json(
    predictions: Sequence[ParallelPrediction], refusals: Sequence[str]
) -> dict[str, Any]:
    """Return predictions, the best ones of each model, and refusals as JSON values."""
    by_model = {p.model: [q for q in predictions if q.model == p.model] for p in predictions}
    return {
        "predictions": [prediction.to_dict() for prediction in predictions],
        "best": {
            model: {what: prediction.to_dict() for what, prediction in best(own).items()}
            for model, own in by_model.items()
        },
        "refused": list(refusals),
    }


def _spread(strategy: Strategy, count: int, per_node: int, accumulation: int) -> Parallelism:
    """So many GPUs over as few nodes as they need."""
    nodes = -(-count // per_node)
    if nodes > 0 and count % nodes:
        raise InputError(f"{count} GPUs do not divide over {nodes} nodes; take a multiple of them")
    return Parallelism(
        strategy=strategy,
        gpus=count // nodes if nodes > 0 else count,
        nodes=max(nodes, 1),
        accumulation=accumulation,
    )


def _devices(names: Sequence[str] | None, snapshot: Any) -> list[str | None]:
    if not names:
        return [None]
    if list(names) != ["all"]:
        return [*names]
    keys = Question(phase=Phase.TRAIN, snapshot=snapshot).device_keys(None, "all")
    return [key for key in keys if rank_key(key).ranks == 1]


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
