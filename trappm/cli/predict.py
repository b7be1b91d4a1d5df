"""`trappm predict` and `trappm compare`: what a step takes on a device, and on several."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trappm.cli import options
from trappm.cli.options import print_json, with_fields
from trappm.profiler.records import PRECISION_NAMES

if TYPE_CHECKING:
    from trappm.profiler.memory.simulation import TrainingLoop

MAX_BATCH_SIZES = 64
"""Rows of a table of batch sizes."""

Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL",
        help="timm architectures, hf: names, package.module:function, or ONNX files.",
        autocompletion=options.shell.models,
    ),
]
Devices = Annotated[
    list[str] | None,
    typer.Option(
        "--device",
        help="Device by any of its names, repeatable, or all GPUs (default: all).",
        autocompletion=options.shell.devices_or_all,
    ),
]
BatchSizes = Annotated[
    str | None,
    typer.Option(
        "--batch-size",
        metavar="<int>[,<int>...]",
        help="Samples per step; several make a table (default: the file's own, or 1).",
    ),
]


@dataclass(kw_only=True)
class TableOptions(options.SettingOptions):
    """Options for the settings of a table of steps, which may have several precisions."""

    precision: Annotated[
        str | None,
        typer.Option(
            metavar="<str>[,<str>...]",
            help=f"{PRECISION_NAMES}; several make a table (default: most labels').",
        ),
    ] = None


@with_fields()
def predict(
    model: options.Model,
    device: options.DeviceName = None,
    *,
    batch_size: BatchSizes = None,
    size: options.SizeOptions,
    phase: options.Phase = "train",
    settings: TableOptions,
    implementation: Annotated[
        str | None,
        typer.Option(help="Optimizer implementation: foreach, fused or plain (default: foreach)."),
    ] = None,
    accumulation: Annotated[int, typer.Option(min=1, help="Passes per optimizer step.")] = 1,
    expandable: Annotated[
        bool,
        typer.Option("--expandable-segments", help="CUDA allocator with expandable_segments:True."),
    ] = False,
    is_compiled: Annotated[
        bool, typer.Option("--compile", help="Predict the step under torch.compile.")
    ] = False,
    snapshot: options.SnapshotName = None,
    run: options.RunOptions,
    labels: Annotated[
        bool, typer.Option("--labels", help="Show the best label of this step, if measured.")
    ] = False,
    breakdown: Annotated[
        bool, typer.Option("--breakdown", help="Break down the memory by part, module and tensor.")
    ] = False,
    depth: Annotated[
        int, typer.Option(min=1, max=20, help="Levels of modules in --breakdown.")
    ] = 1,
    trace_seconds: Annotated[
        float | None,
        typer.Option(help="Limit for tracing a file in seconds (default: 120)."),
    ] = None,
    slurm: Annotated[
        bool,
        typer.Option("--slurm", help="Print #SBATCH lines for the run, with its longest time."),
    ] = False,
    explain: options.Explain = False,
    as_json: options.AsJson = False,
) -> None:
    """Predict time, memory, power and energy of a step, what fits, and what a whole run costs.

    Example: trappm predict resnet50 --batch-size 64 --device a100
    """
    from trappm.prediction.predict import predict as predict_step
    from trappm.profiler.errors import InputError
    from trappm.profiler.records import Precision, member

    for name, is_given in (("--json", as_json), ("--breakdown", breakdown)):
        if slurm and is_given:
            raise InputError(f"--slurm and {name} exclude each other; choose one")
    batches = _batch_sizes(batch_size)
    precisions: list[str | None] = [None]
    if settings.precision is not None:
        parts = dict.fromkeys(part.strip() for part in settings.precision.split(","))
        precisions = [member("precision", Precision, part) for part in parts]
    for name, is_given in (("--breakdown", breakdown), ("--slurm", slurm)):
        if is_given and len(batches) * len(precisions) > 1:
            raise InputError(f"{name} needs one batch size and one precision")
    predictions = [
        predict_step(
            model,
            device=device,
            batch_size=batch,
            **vars(size),
            phase=phase,
            precision=each,
            memory_format=settings.memory_format,
            optimizer=_loop(settings.optimizer, implementation, expandable, phase),
            accumulation=accumulation,
            execution="compile" if is_compiled else None,
            snapshot=snapshot,
            **vars(run),
            labels=labels,
            trace_seconds=trace_seconds,
        )
        for each in precisions
        for batch in batches
    ]
    if as_json:
        answers = [one.to_dict(breakdown_depth=depth if breakdown else None) for one in predictions]
        print_json(answers if len(answers) > 1 else answers[0])
        return
    from trappm.reports import predictions as tables

    if len(predictions) > 1:
        tables.print_settings(predictions, explain=explain)
        return
    if slurm:
        tables.print_slurm(predictions[0])
        return
    tables.print_prediction(predictions[0], explain=explain)
    if breakdown:
        tables.print_breakdown(predictions[0], depth)


@with_fields()
def compare(
    models: Models,
    device: Devices = None,
    *,
    batch_size: options.BatchSize = None,
    size: options.SizeOptions,
    phase: options.Phase = "train",
    settings: options.SettingOptions,
    is_compiled: Annotated[
        bool, typer.Option("--compile", help="Show steps under torch.compile next to eager ones.")
    ] = False,
    snapshot: options.SnapshotName = None,
    run: options.RunOptions,
    sort: Annotated[
        Literal["cost", "time"] | None,
        typer.Option(help="Order by cost or step time (default: models and devices as named)."),
    ] = None,
    explain: options.Explain = False,
    as_json: options.AsJson = False,
) -> None:
    """Compare GPUs or models: the fastest, the cheapest, and what fits.

    Without --device these are all GPUs with heads.

    Example: trappm compare resnet50 --batch-size 128 --phase infer --epochs 1 --samples 1000000
    """
    from trappm.prediction.comparison import (
        compare_able,
        comparison_json,
        payoffs,
        sorted_by_least,
    )

    predictions, left_out = compare_able(
        models,
        device,
        batch_size=batch_size,
        **vars(size),
        phase=phase,
        **vars(settings),
        snapshot=snapshot,
        **vars(run),
        executions=("eager", "compile") if is_compiled else ("eager",),
    )
    if sort is not None:
        predictions = sorted_by_least(predictions, sort)
    compiling = payoffs(predictions) if is_compiled else []
    if as_json:
        more = {"compiling": [x._asdict() for x in compiling]} if is_compiled else {}
        print_json(comparison_json(predictions, left_out) | more)
        return
    from trappm.reports.predictions import print_comparison

    print_comparison(predictions, left_out, compiling, explain=explain)


def _batch_sizes(text: str | None) -> list[int | None]:
    """Return the batch sizes of an option; [None] if it was not given.

    Raises:
        InputError: A part is no number, or there are more than `MAX_BATCH_SIZES`.
    """
    if text is None:
        return [None]
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts) or len(parts) > MAX_BATCH_SIZES:
        from trappm.profiler.errors import InputError

        raise InputError(
            f"--batch-size is {text!r}; it must be a number, or up to {MAX_BATCH_SIZES} numbers "
            "separated by commas, such as 16,32,64"
        )
    return [*dict.fromkeys(int(part) for part in parts)]


def _loop(
    optimizer: str | None,
    implementation: str | None,
    expandable: bool,
    phase: str,
) -> str | TrainingLoop | None:
    """Return the optimizer's name, or the training loop if it is not the usual one.

    Raises:
        InputError: There is no such implementation, or the step is one of inference.
    """
    if implementation is None and not expandable:
        return optimizer
    from trappm.prediction.question import loop_of
    from trappm.profiler.errors import InputError
    from trappm.profiler.memory.simulation import Implementation
    from trappm.profiler.records import member

    if phase == "infer" and implementation is not None:
        raise InputError("--implementation is of training; leave it out with --phase infer")
    return replace(
        loop_of(optimizer or "sgd"),
        implementation=member("implementation", Implementation, implementation or "foreach"),
        expandable_segments=expandable,
    )
