"""Comparison of parallel strategies and numbers of GPUs by throughput, price and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from trappm.extensions.parallel.schedules import Parallelism, ShardingStrategy, strategy_of
from trappm.extensions.parallel.shared_step import ParallelPrediction, SharedStep
from trappm.prediction.fit import VERDICTS, Verdict
from trappm.prediction.question import Question
from trappm.prediction.selection import Selection
from trappm.profiler.devices.catalogue import rank_key
from trappm.profiler.errors import InputError, UnsupportedModelError
from trappm.profiler.host.environment import independent_of_caller
from trappm.profiler.records import Phase
from trappm.terminal.tables import print_line, print_notes, print_table

if TYPE_CHECKING:
    from trappm.prediction.models import Subject

AUTO = "auto"
"""Name of the fastest strategy whose memory may fit."""
Scaling = tuple[list[ParallelPrediction], list[str]]
"""Predictions, and one line with the reason for each rejected combination."""


@independent_of_caller
def scaling(
    models: Sequence[str | Subject],
    devices: Sequence[str] | None,
    counts: Sequence[int],
    strategies: Sequence[str] = (),
    *,
    accumulation: int = 1,
    tensor: int | None = None,
    pipeline: int = 1,
    sharded_optimizer: bool = False,
    sequence_parallel: bool = False,
    gpus_per_node: int | None = None,
    network_gbit: float | None = None,
    **question: Any,
) -> Scaling:
    """Predict models on devices with all feasible strategies and numbers of GPUs.

    Args:
        models: Timm names, transformers, paths of ONNX files, or profiled models.
        devices: Devices by any of their names, or `all` GPUs (default: `DEFAULT_DEVICE`).
        counts: Total numbers of GPUs; several nodes are used if one node has too few GPUs.
        strategies: Strategies (default: all). `auto` is the fastest of all that may fit.
        accumulation: Passes per optimizer step.
        tensor: GPUs that split each product with `tp` (default: all of a node).
        pipeline: Stages of the model with `tp`.
        sharded_optimizer: Whether replicas divide the optimizer states with `ddp` and `tp`.
        sequence_parallel: Whether the GPUs that split a product also split the hidden states
            between products, with `tp`.
        gpus_per_node: GPUs per node (default: those of a typical node of the card).
        network_gbit: Network speed per node in Gbit/s (default: that of a typical node).
        **question: Further arguments of `SharedStep.of`.

    Raises:
        InputError: No combination is feasible, with the first reason.
        TrappmError: As `predict`.
    """
    _refuse_useless(
        strategies, sharded_optimizer=sharded_optimizer, sequence_parallel=sequence_parallel
    )
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
            for strategy in strategies or ShardingStrategy:
                for count in counts:
                    made, reasons = list[ParallelPrediction](), list[str]()
                    layouts = [{"strategy": strategy, "tensor": tensor, "pipeline": pipeline}]
                    for layout in _layouts(count) if strategy == AUTO else layouts:
                        try:
                            parallelism = replace(
                                _spread(count, per_node, accumulation, **layout),
                                sharded_optimizer=sharded_optimizer
                                and strategy != ShardingStrategy.FSDP,
                                sequence_parallel=sequence_parallel
                                and layout["strategy"] == ShardingStrategy.TP,
                            )
                            made.append(step.on(parallelism, network_gbit))
                        except InputError as error:
                            reasons.append(str(error))
                    predictions += [_fastest(made)] if strategy == AUTO and made else made
                    refusals |= dict.fromkeys([] if made else reasons)
    if not predictions:
        raise InputError(next(iter(refusals), "no number of GPUs was given; add --gpus 1,2,4,8"))
    return predictions, list(refusals)


def _refuse_useless(
    strategies: Sequence[str], *, sharded_optimizer: bool, sequence_parallel: bool
) -> None:
    """Raise InputError for an unknown strategy, or an option that no strategy has."""
    requested = {name if name == AUTO else strategy_of(name) for name in strategies}
    if sharded_optimizer and requested == {ShardingStrategy.FSDP}:
        raise InputError("fsdp shards the optimizer anyway; leave sharded-optimizer out")
    if sequence_parallel and requested and not requested & {ShardingStrategy.TP, AUTO}:
        raise InputError(f"{strategies[0]} has no sequence-parallel; use strategy tp")


def best(predictions: Sequence[ParallelPrediction]) -> dict[str, ParallelPrediction]:
    """Return the `fastest` and the `cheapest` prediction of one model among those that may fit.

    The first of several that are equal to four digits, as tables print them.
    """
    fitting = [p for p in predictions if p.verdict is not Verdict.DOES_NOT_FIT]
    priced = [(p.usd_per_million, p) for p in fitting if p.usd_per_million is not None]
    chosen = {}
    if fitting:
        chosen["fastest"] = _fastest(fitting)
    if priced:
        chosen["cheapest"] = min(priced, key=lambda pair: _to_digits(pair[0]))[1]
    return chosen


def scaling_json(
    predictions: Sequence[ParallelPrediction], refusals: Sequence[str]
) -> dict[str, Any]:
    """Return predictions, the best predictions of each model, and rejections as JSON values."""
    by_model = {p.model: [q for q in predictions if q.model == p.model] for p in predictions}
    return {
        "predictions": [prediction.to_dict() for prediction in predictions],
        "best": {
            model: {what: prediction.to_dict() for what, prediction in best(own).items()}
            for model, own in by_model.items()
        },
        "refused": list(refusals),
    }


def _fastest(predictions: Sequence[ParallelPrediction]) -> ParallelPrediction:
    """Return the fastest prediction that may fit, or else the one with the least memory."""
    fitting = [p for p in predictions if p.verdict is not Verdict.DOES_NOT_FIT]
    if not fitting:
        return min(predictions, key=lambda p: p.memory_mib or 0.0)
    return max(fitting, key=lambda p: _to_digits(p.samples_per_s))


def _to_digits(value: float) -> float:
    return float(f"{value:.4g}")


def _layouts(count: int) -> Iterator[dict[str, Any]]:
    """Yield all strategies, and all divisions of the model over `count` GPUs."""
    yield from (
        {"strategy": strategy} for strategy in (ShardingStrategy.DDP, ShardingStrategy.FSDP)
    )
    for tensor, pipeline in product([n for n in range(1, count + 1) if not count % n], repeat=2):
        if 1 < tensor * pipeline <= count:
            yield {"strategy": ShardingStrategy.TP, "tensor": tensor, "pipeline": pipeline}


def _spread(
    count: int,
    per_node: int,
    accumulation: int,
    *,
    strategy: str,
    tensor: int | None = None,
    pipeline: int = 1,
) -> Parallelism:
    """Distribute `count` GPUs over the smallest number of nodes."""
    nodes = -(-count // per_node)
    if nodes > 0 and count % nodes:
        raise InputError(f"{count} GPUs cannot be split evenly over {nodes} nodes; use a multiple")
    divides = strategy == ShardingStrategy.TP
    return Parallelism(
        strategy=ShardingStrategy(strategy),
        gpus=count // nodes if nodes > 0 else count,
        nodes=max(nodes, 1),
        accumulation=accumulation,
        tensor=tensor if divides else None,
        pipeline=pipeline if divides else 1,
    )


def _devices(names: Sequence[str] | None, snapshot: Any) -> list[str | None]:
    if not names:
        return [None]
    if list(names) != ["all"]:
        return [*names]
    keys = Selection(Question(phase=Phase.TRAIN, snapshot=snapshot)).device_keys(None, "all")
    return [key for key in keys if rank_key(key).ranks == 1]


def print_scaling(
    predictions: Sequence[ParallelPrediction], refusals: Sequence[str], *, explain: bool = False
) -> None:
    """Print the question, the fastest and cheapest setup, and a table for each model."""
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
                p.layout,
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
    """Describe the question, without the device if there are several."""
    device = f"{p.device_name} (default)" if p.device_is_default else p.device_name
    subject = p.model if several else f"{p.model} on {device}"
    tokens = "" if p.sequence_length is None else f" and {p.sequence_length:,} tokens"
    passes = f", {p.accumulation} passes" if p.accumulation > 1 else ""
    return f"{subject}, {p.precision}, batch {p.batch_size:,}{tokens} per GPU{passes}."


def _print_best(predictions: Sequence[ParallelPrediction], *, several: bool) -> None:
    chosen = best(predictions)
    if not chosen:
        print_line("No setup fits.")
    for what, p in chosen.items():
        cards = f" {p.device}" if several else " GPU" if p.ranks == 1 else " GPUs"
        figure = f"{p.samples_per_s:,.0f} samples/s"
        if what == "cheapest":
            figure = f"{p.usd_per_million:.2f} USD per million samples"
        print_line(f"{what.capitalize()}: {p.layout} on {p.ranks}{cards}, {figure}.")
