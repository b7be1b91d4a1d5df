"""`trappm predict`: the cost of a step of a timm model or an ONNX file."""

from __future__ import annotations

from typing import Annotated

import typer

from trappm.cli import options
from trappm.cli.options import AsJson, print_json


def predict(
    model: options.Model,
    batch_size: options.BatchSize = None,
    input_size: options.InputSize = None,
    device: Annotated[
        str | None, typer.Option(help="A device of the snapshot; its source device by default.")
    ] = None,
    snapshot: Annotated[str, typer.Option(help="A snapshot's id, alias or folder.")] = "latest",
    as_json: AsJson = False,
) -> None:
    """Predict step time, memory and power of a training step, with a spread.

    Beside it stands the GPU memory of the step in fp32, simulated on CUDA's allocator.

    Example: trappm predict resnet18 --batch-size 4 --input-size 96 --device cpu-2t
    """
    from trappm.prediction import predict as answer

    prediction = answer(
        model, batch_size=batch_size, input_size=input_size, device=device, snapshot=snapshot
    )
    if as_json:
        print_json(prediction.to_dict())
    else:
        from trappm.tables import print_prediction

        print_prediction(prediction)
