"""`trappm advise` and `trappm check`: make a step fit, and refuse one that does not."""

from __future__ import annotations

from typing import Annotated

import typer

from trappm.cli import options
from trappm.cli.options import print_json, with_fields

MaxHours = Annotated[
    float | None,
    typer.Option("--max-hours", help="Largest duration of the run; needs --epochs and --samples."),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(rich_help_panel="Predict")(advise)
    app.command(rich_help_panel="Predict")(check)


@with_fields()
def advise(
    model: options.Model,
    device: options.DeviceName = None,
    *,
    batch_size: options.BatchSize = None,
    size: options.SizeOptions,
    settings: options.SettingOptions,
    max_hours: MaxHours = None,
    run: options.RunOptions,
    snapshot: options.SnapshotName = None,
    explain: options.Explain = False,
    as_json: options.AsJson = False,
) -> None:
    """Find the cheapest change that makes a step fit, or a run end in time.

    Changes are ordered by the time that they cost. With --explain, each has its lines of Python.

    Example: trappm advise vit_base_patch16_224 --batch-size 512 --device v100
    """
    from trappm.extensions.advice.advising import advise as find_advice
    from trappm.extensions.advice.report import print_advice

    advice = find_advice(
        model,
        device=device,
        batch_size=batch_size,
        **vars(size),
        max_hours=max_hours,
        **vars(settings),
        **vars(run),
        snapshot=snapshot,
    )
    if as_json:
        print_json(advice.to_dict())
    else:
        print_advice(advice, explain=explain)


@with_fields()
def check(
    model: options.Model,
    device: options.DeviceName = None,
    *,
    max_memory: Annotated[
        str | None,
        typer.Option(help="Largest memory with its unit, such as 38GiB (default: the GPU's)."),
    ] = None,
    max_hours: MaxHours = None,
    max_cost: Annotated[
        float | None,
        typer.Option(help="Largest price of the run in USD; needs --epochs and --samples."),
    ] = None,
    batch_size: options.BatchSize = None,
    size: options.SizeOptions,
    phase: options.Phase = "train",
    settings: options.SettingOptions,
    run: options.RunOptions,
    snapshot: options.SnapshotName = None,
    as_json: options.AsJson = False,
) -> None:
    """Check limits of memory, time and cost before a launch.

    The exit status is 0 if all limits hold, 1 if one does not, 3 if that is not certain (a limit is
    within the 90 % interval), and 2 for bad input.

    Example: trappm check resnet50 --batch-size 64 --device a100 --max-memory 38GiB
    """
    from trappm.extensions.advice.guard import check as check_limits
    from trappm.extensions.advice.report import print_check

    made = check_limits(
        model,
        device=device,
        max_memory=max_memory,
        max_hours=max_hours,
        max_cost=max_cost,
        batch_size=batch_size,
        **vars(size),
        phase=phase,
        **vars(settings),
        **vars(run),
        snapshot=snapshot,
    )
    if as_json:
        print_json(made.to_dict())
    else:
        print_check(made)
    if made.exit_status:
        raise typer.Exit(made.exit_status)
