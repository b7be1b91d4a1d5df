"""`trappm roofline`: the roofline of devices, and the kernels of a step under it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trappm.cli import devices as devices_command
from trappm.cli import options, shell
from trappm.cli.options import AsJson, BatchSize, InputSize, print_json
from trappm.prediction.device_names import DEFAULT_DEVICE

if TYPE_CHECKING:
    from trappm.profiler.kernels.kernel_call import KernelMeasurement


def register(app: typer.Typer) -> None:
    """Add the command, and the ceilings to `trappm devices NAME`."""
    app.command(rich_help_panel="Predict")(roofline)
    devices_command.DETAILS.append(_detail)


def _detail(key: str, kernels: Sequence[KernelMeasurement]) -> str | None:
    """Describe the ceilings of a device; None if they are unknown."""
    from trappm.extensions.roofline.report import ceilings_text
    from trappm.extensions.roofline.roofs import device_of

    device = device_of(key, kernels)
    return f"ceilings: {ceilings_text(device)}" if device.roofs else None


def roofline(
    devices: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DEVICE",
            help="Devices by any of their names (default: a100-40gb).",
            autocompletion=shell.devices,
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="timm architecture or ONNX file whose step to show.")
    ] = None,
    batch_size: BatchSize = None,
    input_size: InputSize = None,
    sequence_length: options.SequenceLength = None,
    phase: options.Phase = "train",
    precision: options.Precision = None,
    memory_format: options.MemoryFormat = None,
    optimizer: options.Optimizer = None,
    snapshot: Annotated[
        str | None, typer.Option(help="Snapshot that predicts kernel times, as in predict.")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the roofline into this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the rooflines of devices, and what bounds a model's step on them.

    Ceilings come from measured kernels, or from the data sheet if there are no measurements.

    Example: trappm roofline v100 a100 --model resnet50 --batch-size 64
    """
    from trappm.extensions.roofline.drawing import draw_png
    from trappm.extensions.roofline.report import devices_json, print_rooflines
    from trappm.extensions.roofline.roofs import known_device
    from trappm.label_store import store_or_none_yet
    from trappm.store import Home
    from trappm.terminal.plots import require_matplotlib

    if png is not None:
        require_matplotlib("--png")
    names = devices or [DEFAULT_DEVICE]
    with store_or_none_yet(Home.find()) as store:
        known = [known_device(store, name) for name in names]
    steps = []
    if model is not None:
        from trappm.extensions.roofline.steps import roofed_steps
        from trappm.prediction.models.subjects import subject_of
        from trappm.prediction.question import Question

        question = Question(
            batch_size=batch_size,
            phase=phase,
            precision=precision,
            memory_format=memory_format,
            optimizer=optimizer,
            snapshot=snapshot,
        )
        subject = subject_of(model, input_size=input_size, sequence_length=sequence_length)
        steps = roofed_steps(question, subject, known)
    if png is not None:
        draw_png(known, steps, png)
    if as_json:
        print_json(devices_json(known, steps))
    else:
        print_rooflines(known, steps, is_default=not devices)
