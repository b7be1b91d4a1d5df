"""`trappm scale`: compare numbers of GPUs and parallel strategies for a training step."""

from __future__ import annotations

from typing import Annotated

import typer

from trappm.cli import options
from trappm.cli.options import print_json, with_fields
from trappm.cli.predict import Devices, Models
from trappm.profiler.errors import InputError

_COUNTS = "1,2,4,8,16"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Predict")(scale)


@with_fields()
def scale(
    models: Models,
    device: Devices = None,
    *,
    batch_size: options.BatchSize = None,
    size: options.SizeOptions,
    settings: options.SettingOptions,
    snapshot: options.SnapshotName = None,
    gpus: Annotated[
        str | None, typer.Option("--gpus", help=f"Total numbers of GPUs (default: {_COUNTS}).")
    ] = None,
    per_node: Annotated[
        int | None,
        typer.Option("--per-node", min=1, help="GPUs per node (default: those of a usual node)."),
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(help="ddp, fsdp, tp, or auto for the fastest; repeatable (default: all)."),
    ] = None,
    accumulation: Annotated[int, typer.Option(min=1, help="Passes per optimizer step.")] = 1,
    tensor: Annotated[
        int | None,
        typer.Option(min=1, help="GPUs that split each product with tp (default: a node's)."),
    ] = None,
    pipeline: Annotated[int, typer.Option(min=1, help="Stages of the model with tp.")] = 1,
    sharded: Annotated[
        bool,
        typer.Option("--sharded-optimizer", help="Divide optimizer states over replicas (ZeRO-1)."),
    ] = False,
    sequence: Annotated[
        bool,
        typer.Option(
            "--sequence-parallel", help="Split hidden states over the --tensor GPUs (tp)."
        ),
    ] = False,
    network: Annotated[
        float | None,
        typer.Option("--network", help="Network between nodes in Gbit/s (default: usual node's)."),
    ] = None,
    explain: options.Explain = False,
    as_json: options.AsJson = False,
) -> None:
    """Compare strategies and numbers of GPUs: which is fastest, cheapest, and fits?

    Each GPU takes --batch-size samples per pass.

    Example: trappm scale resnet50 --batch-size 64 --device a100 --gpus 1,2,4,8,16
    """
    from trappm.prediction.models import subject_of

    for model in models:
        subject_of(model, **vars(size))  # refuses it before torch is imported
    from trappm.extensions.parallel.scaling import print_scaling, scaling, scaling_json

    named = _COUNTS if gpus is None else gpus
    try:
        counts = sorted({int(count) for count in named.split(",")})
    except ValueError:
        raise InputError(f"--gpus is {named!r}; give numbers with commas, such as 1,2,4") from None
    predictions, refusals = scaling(
        models,
        device,
        counts,
        strategy or (),
        gpus_per_node=per_node,
        accumulation=accumulation,
        tensor=tensor,
        pipeline=pipeline,
        sharded_optimizer=sharded,
        sequence_parallel=sequence,
        network_gbit=network,
        batch_size=batch_size,
        **vars(size),
        **vars(settings),
        snapshot=snapshot,
    )
    if as_json:
        print_json(scaling_json(predictions, refusals))
    else:
        print_scaling(predictions, refusals, explain=explain)
