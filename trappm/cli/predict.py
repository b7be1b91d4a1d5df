"""`trappm predict` and `trappm compare`: what a step of a model costs, and where it is cheapest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from trappm.cli import options, shell
from trappm.cli.options import AsJson, print_json

if TYPE_CHECKING:
    from trappm.prediction.prediction import Prediction

Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL",
        help="timm architectures, hf: names, or ONNX files.",
        autocompletion=shell.models,
    ),
]
DeviceName = Annotated[
    list[str] | None,
    typer.Option(
        "--device",
        help="A device by any of its names, again for more, or all; by default the snapshot's.",
        autocompletion=shell.devices,
    ),
]
Phase = Annotated[str, typer.Option(help="train or infer.")]
Precision = Annotated[
    str | None, typer.Option(help="fp32, amp-fp16, amp-bf16 or bf16; as most labels.")
]
MemoryFormat = Annotated[str | None, typer.Option(help="contiguous or channels-last.")]
Optimizer = Annotated[str | None, typer.Option(help="sgd, momentum, adam or adamw.")]
SnapshotName = Annotated[
    str | None,
    typer.Option(
        "--snapshot",
        help="An id, alias or folder; by default latest, then default.",
        autocompletion=shell.snapshots,
    ),
]
Epochs = Annotated[int | None, typer.Option(help="Of a whole run, with --samples.")]
Samples = Annotated[int | None, typer.Option(help="Of one epoch.")]
Carbon = Annotated[float | None, typer.Option(help="Of the electricity, in g CO2 per kWh.")]
PowerLimit = Annotated[
    float | None,
    typer.Option("--power-limit", help="Of the card, in W; by default as delivered."),
]


def predict(
    models: Models,
    batch_size: options.BatchSize = None,
    input_size: options.InputSize = None,
    sequence_length: options.SequenceLength = None,
    device: DeviceName = None,
    phase: Phase = "train",
    precision: Precision = None,
    memory_format: MemoryFormat = None,
    optimizer: Optimizer = None,
    snapshot: SnapshotName = None,
    epochs: Epochs = None,
    samples: Samples = None,
    carbon: Carbon = None,
    power_limit: PowerLimit = None,
    as_json: AsJson = False,
) -> None:
    """Predict time, memory, power and energy of a step, what fits, and what a whole run costs.

    Beside it stands the GPU memory of the step in fp32, simulated on CUDA's allocator.

    Example: trappm predict resnet50 --batch-size 64 --device a100
    """
    from trappm.terminal.prediction_tables import print_comparison, print_prediction

    predictions = _ask(
        models,
        device,
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
    if as_json:
        rows = [prediction.to_dict() for prediction in predictions]
        print_json(
            rows if len(models) > 1 or len(device or []) > 1 or device == ["all"] else rows[0]
        )
    elif len(predictions) == 1:
        print_prediction(predictions[0])
    else:
        print_comparison(predictions)


def compare(
    models: Models,
    batch_size: options.BatchSize = None,
    input_size: options.InputSize = None,
    sequence_length: options.SequenceLength = None,
    device: DeviceName = None,
    phase: Phase = "train",
    precision: Precision = None,
    snapshot: SnapshotName = None,
    epochs: Epochs = None,
    samples: Samples = None,
    carbon: Carbon = None,
    as_json: AsJson = False,
) -> None:
    """Compare devices: on which is a model fastest, cheapest, and on which does it fit?

    Example: trappm compare resnet50 --batch-size 128 --phase infer --epochs 1 --samples 1000000
    """
    from trappm.prediction.comparison import verdicts
    from trappm.terminal.prediction_tables import print_comparison

    predictions = _ask(
        models,
        device or ["all"],
        batch_size=batch_size,
        input_size=input_size,
        sequence_length=sequence_length,
        phase=phase,
        precision=precision,
        snapshot=snapshot,
        epochs=epochs,
        samples=samples,
        carbon_g_per_kwh=carbon,
    )
    if as_json:
        print_json(
            {
                "predictions": [prediction.to_dict() for prediction in predictions],
                "best": verdicts(predictions),
            }
        )
    else:
        print_comparison(predictions)


def _ask(models: list[str], device: list[str] | None, **options: Any) -> list[Prediction]:
    from trappm.prediction.predict import predict as answer

    if not device:
        return answer(models, **options)
    return answer(models, devices="all" if device == ["all"] else device, **options)
