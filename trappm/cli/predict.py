"""`trappm predict` and `trappm compare`: what a step takes on a device, and on several."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from trappm.cli import options
from trappm.cli.options import print_json

if TYPE_CHECKING:
    from trappm.profiler.simulation.training_loop import TrainingLoop

Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL",
        help="timm architectures, hf: names, or ONNX files.",
        autocompletion=options.shell.models,
    ),
]
Devices = Annotated[
    list[str] | None,
    typer.Option(
        "--device",
        help="Device by any of its names, repeatable, or all GPUs (default: all).",
        autocompletion=options.shell.devices,
    ),
]
Epochs = Annotated[
    int | None,
    typer.Option(help="Number of epochs of a whole run, without data loading; needs --samples."),
]
Samples = Annotated[int | None, typer.Option(help="Number of training samples per epoch.")]
Carbon = Annotated[
    float | None, typer.Option(help="Carbon intensity of the electricity (g CO2/kWh).")
]
PowerLimit = Annotated[
    float | None,
    typer.Option("--power-limit", help="GPU power limit in watts (default: factory setting)."),
]


def predict(
    model: options.Model,
    device: options.DeviceName = None,
    batch_size: options.BatchSize = None,
    input_size: options.InputSize = None,
    sequence_length: options.SequenceLength = None,
    phase: options.Phase = "train",
    precision: options.Precision = None,
    memory_format: options.MemoryFormat = None,
    optimizer: options.Optimizer = None,
    implementation: Annotated[
        str | None,
        typer.Option(help="Optimizer implementation: foreach, fused or plain (default: foreach)."),
    ] = None,
    accumulation: Annotated[int, typer.Option(min=1, help="Passes per optimizer step.")] = 1,
    snapshot: options.SnapshotName = None,
    epochs: Epochs = None,
    samples: Samples = None,
    carbon: Carbon = None,
    power_limit: PowerLimit = None,
    labels: Annotated[
        bool, typer.Option("--labels", help="Show the best label of this step, if measured.")
    ] = False,
    breakdown: Annotated[
        bool, typer.Option("--breakdown", help="Break down the memory by part, module and tensor.")
    ] = False,
    depth: Annotated[
        int, typer.Option(min=1, max=20, help="Levels of modules in --breakdown.")
    ] = 1,
    explain: options.Explain = False,
    as_json: options.AsJson = False,
) -> None:
    """Predict time, memory, power and energy of a step, what fits, and what a whole run costs.

    Example: trappm predict resnet50 --batch-size 64 --device a100
    """
    from trappm.prediction.predict import predict as predict_step

    prediction = predict_step(
        model,
        device=device,
        batch_size=batch_size,
        input_size=input_size,
        sequence_length=sequence_length,
        phase=phase,
        precision=precision,
        memory_format=memory_format,
        optimizer=_loop(optimizer, precision, implementation, accumulation, phase),
        snapshot=snapshot,
        epochs=epochs,
        samples=samples,
        carbon_g_per_kwh=carbon,
        power_limit_w=power_limit,
        labels=labels,
    )
    if as_json:
        print_json(prediction.to_dict(breakdown_depth=depth if breakdown else None))
        return
    from trappm.terminal.prediction_tables import print_breakdown, print_prediction

    print_prediction(prediction, explain=explain)
    if breakdown:
        print_breakdown(prediction, depth)


def compare(
    models: Models,
    device: Devices = None,
    batch_size: options.BatchSize = None,
    input_size: options.InputSize = None,
    sequence_length: options.SequenceLength = None,
    phase: options.Phase = "train",
    precision: options.Precision = None,
    memory_format: options.MemoryFormat = None,
    optimizer: options.Optimizer = None,
    snapshot: options.SnapshotName = None,
    epochs: Epochs = None,
    samples: Samples = None,
    carbon: Carbon = None,
    power_limit: PowerLimit = None,
    explain: options.Explain = False,
    as_json: options.AsJson = False,
) -> None:
    """Compare GPUs or models: the fastest, the cheapest, and what fits.

    Without --device these are all GPUs that a model was trained on.

    Example: trappm compare resnet50 --batch-size 128 --phase infer --epochs 1 --samples 1000000
    """
    from trappm.prediction.comparison import best_models, comparable, verdicts
    from trappm.prediction.predict import compare as compare_steps
    from trappm.prediction.question import Question

    everywhere = not device or "all" in device
    predictions = compare_steps(
        models,
        device or None,
        batch_size=batch_size,
        input_size=input_size,
        sequence_length=sequence_length,
        phase=phase,
        precision=precision,
        memory_format=memory_format,
        optimizer=optimizer,
        snapshot=snapshot,
        epochs=epochs,
        samples=samples,
        carbon_g_per_kwh=carbon,
        power_limit_w=power_limit,
    )
    predictions, left_out = comparable(predictions, near_labels=everywhere)
    if everywhere:
        question = Question(phase=phase, precision=precision, snapshot=snapshot)
        unable = question.unable_devices()
        left_out += [{"device": key, "reason": reason} for key, reason in unable.items()]
    if as_json:
        print_json(
            {
                "predictions": [prediction.to_dict() for prediction in predictions],
                "best": verdicts(predictions),
                "best_of_all": {
                    what: {"model": best.model, "device": best.device}
                    for what, best in best_models(predictions).items()
                },
                "left_out": left_out,
            }
        )
        return
    from trappm.terminal.prediction_tables import print_comparison

    print_comparison(predictions, left_out, explain=explain)


def _loop(
    optimizer: str | None,
    precision: str | None,
    implementation: str | None,
    accumulation: int,
    phase: str,
) -> str | TrainingLoop | None:
    """Return the optimizer's name, or the training loop if it is not the usual one.

    Raises:
        InputError: There is no such implementation, or the step is one of inference.
    """
    if implementation is None and accumulation == 1:
        return optimizer
    from trappm.prediction.question import loop_of
    from trappm.profiler.errors import InputError
    from trappm.profiler.records import Precision, member
    from trappm.profiler.simulation.training_loop import Implementation

    if phase == "infer":
        raise InputError(
            "--accumulation and --implementation are of training; leave them out with --phase infer"
        )
    arithmetic = member("precision", Precision, precision or Precision.FP32)
    return replace(
        loop_of(optimizer or "sgd", arithmetic),
        implementation=member("implementation", Implementation, implementation or "foreach"),
        accumulation_steps=accumulation,
    )
