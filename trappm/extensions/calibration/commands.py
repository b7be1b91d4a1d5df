"""`trappm calibrate`: adjust predictions to a device by a handful of its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trappm.cli import options
from trappm.cli.options import print_json


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Labels and snapshots")(calibrate)


def calibrate(
    steps: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="Measured steps: .csv, or labels as .jsonl or .parquet.",
        ),
    ],
    device: Annotated[
        str,
        typer.Option(
            help="Device of the steps by any of its names, or a card in cards.csv of TRAPPM_HOME.",
            autocompletion=options.shell.devices,
        ),
    ],
    snapshot: Annotated[
        str | None,
        typer.Option(
            help="Snapshot to start from (default: as of trappm predict).",
            autocompletion=options.shell.snapshots,
        ),
    ] = None,
    to: Annotated[
        Path | None, typer.Option(help="New folder (default: among those of TRAPPM_HOME).")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Adjust predictions to a device and its software by a handful of measured steps.

    The errors before and after are of steps that were left out, one at a time. A metric that got
    no better is left as it was. The exit status is 1 if none got better.

    Example: trappm calibrate --device rtx-3090 --steps steps.csv
    """
    from trappm.extensions.calibration.calibrating import calibrate as calibrate_device
    from trappm.extensions.calibration.report import print_calibration
    from trappm.terminal.progress_bars import ProgressLine

    with ProgressLine() as progress:
        made = calibrate_device(
            steps, device=device, snapshot=snapshot, to=to, on_progress=progress.show
        )
    if as_json:
        print_json(made.to_dict())
    else:
        print_calibration(made)
    if made.folder is None:
        raise typer.Exit(1)
