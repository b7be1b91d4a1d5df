"""`trappm roofline`: what bounds a step, and its kernels under the rooflines of devices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trappm.cli import options, shell
from trappm.cli.options import print_json, with_fields


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Predict")(roofline)


@with_fields()
def roofline(
    model: options.Model,
    device: Annotated[
        list[str] | None,
        typer.Option(
            "--device",
            help="Device by any of its names, repeatable (default: a100-40gb).",
            autocompletion=shell.devices,
        ),
    ] = None,
    *,
    batch_size: options.BatchSize = None,
    size: options.SizeOptions,
    phase: options.Phase = "train",
    settings: options.SettingOptions,
    snapshot: options.SnapshotName = None,
    png: Annotated[Path | None, typer.Option(help="Draw the roofline into this file.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Show what bounds a step on GPUs, and its kernels under the peaks of their data sheets.

    Example: trappm roofline resnet50 --batch-size 64 --device v100 --device a100
    """
    from trappm.prediction.models import subject_of
    from trappm.prediction.question import Question
    from trappm.prediction.selection import Selection
    from trappm.terminal.plots import require_matplotlib

    subject = subject_of(model, **vars(size))
    if png is not None:
        require_matplotlib("--png")
    selection = Selection(
        Question(batch_size=batch_size, phase=phase, **vars(settings), snapshot=snapshot)
    )
    # Imported here: they need torch, and the refusals above do not.
    from trappm.extensions.roofline.drawing import draw_png
    from trappm.extensions.roofline.report import print_rooflines, rooflines_json
    from trappm.extensions.roofline.steps import roofline_devices, roofline_steps

    devices = roofline_devices(selection, device)
    steps = roofline_steps(selection, subject, devices)
    if png is not None:
        draw_png(steps, png)
    if as_json:
        print_json(rooflines_json(steps))
    else:
        print_rooflines(steps, is_default=not device)
