"""`trappm estimate`: the memory of a step, what it is made of, and the largest batch that fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from trappm.cli import options, shell
from trappm.cli.options import AsJson, BatchSize, InputSize, Model, SequenceLength, print_json
from trappm.profiler.errors import InputError

Cards = Annotated[
    list[str] | None,
    typer.Option(
        help="Card, such as v100, repeatable (default: a100-40gb).", autocompletion=shell.devices
    ),
]


def estimate(
    model: Model,
    batch_size: BatchSize = None,
    input_size: InputSize = None,
    sequence_length: SequenceLength = None,
    device: Cards = None,
    phase: options.Phase = "train",
    precision: Annotated[str, typer.Option(help="fp32, amp-fp16, amp-bf16 or bf16.")] = "fp32",
    memory_format: Annotated[str, typer.Option(help="contiguous or channels-last.")] = "contiguous",
    optimizer: Annotated[str, typer.Option(help="sgd, momentum, adam or adamw.")] = "sgd",
    implementation: Annotated[
        str, typer.Option(help="Implementation of the optimizer: foreach, fused or plain.")
    ] = "foreach",
    accumulation: Annotated[int, typer.Option(help="Passes before each optimizer step.")] = 1,
    depth: Annotated[int, typer.Option(min=1, max=20, help="Depth of the tree of modules.")] = 1,
    ray: Annotated[bool, typer.Option("--ray", help="Print the resources of a Ray task.")] = False,
    kubernetes: Annotated[
        bool,
        typer.Option("--kubernetes", help="Print a pod as YAML; without --device for any card."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Break down the GPU memory of a step by part, module and tensor, simulated without a GPU.

    Estimate modules of your own in Python with `trappm.estimate`.

    Example: trappm estimate resnet50 --batch-size 64 --optimizer adamw --device v100
    """
    from trappm.prediction.device_names import DEFAULT_DEVICE
    from trappm.prediction.estimate import estimate as estimate_step
    from trappm.prediction.estimate import loop_of
    from trappm.profiler.records import Precision, member
    from trappm.profiler.simulation.training_loop import Implementation
    from trappm.terminal.estimate_tables import print_estimate

    if phase == "infer" and (accumulation > 1 or implementation != Implementation.FOREACH):
        raise InputError(
            "--accumulation and --implementation are of training; leave them out with --phase infer"
        )
    loop = replace(
        loop_of(optimizer, member("precision", Precision, precision)),
        implementation=member("implementation", Implementation, implementation),
        accumulation_steps=accumulation,
    )
    made = estimate_step(
        model,
        batch_size=batch_size,
        input_size=input_size,
        sequence_length=sequence_length,
        phase=phase,
        precision=precision,
        memory_format=memory_format,
        optimizer=loop,
    )
    devices = device or [DEFAULT_DEVICE]
    if ray and kubernetes:
        raise InputError("--ray and --kubernetes are two answers; ask for one of them")
    if ray or kubernetes:
        from trappm.prediction import gpu_requests

        if kubernetes:
            request = gpu_requests.pod(made, device)
            text = gpu_requests.yaml_text(request)
        else:
            request = {name: gpu_requests.ray_options(made, name) for name in devices}
            text = gpu_requests.ray_text(request)
        if as_json:
            key = "kubernetes" if kubernetes else "ray"
            print_json({**made.to_dict(devices, depth), key: request})
        else:
            typer.echo(text, nl=False)
    elif as_json:
        print_json(made.to_dict(devices, depth))
    else:
        print_estimate(made, devices, depth, is_default=not device)


def fits(
    model: Model,
    device: Cards = None,
    batch_size: options.BatchSize = None,
    input_size: InputSize = None,
    sequence_length: SequenceLength = None,
    phase: options.Phase = "train",
    precision: options.Precision = None,
    memory_format: options.MemoryFormat = None,
    optimizer: options.Optimizer = None,
    snapshot: options.SnapshotName = None,
    explain: options.Explain = False,
    as_json: AsJson = False,
) -> None:
    """Tell whether a batch fits a card's memory, or which is the largest that does.

    A batch fits if the upper bound of the 90 % interval of its memory leaves 6 % of the card free.

    Example: trappm fits resnet50 --device a100 --optimizer adamw
    """
    from trappm.prediction.room import rooms
    from trappm.terminal.tables import print_line, print_notes

    rows = rooms(
        model,
        device,
        batch_size=batch_size,
        input_size=input_size,
        sequence_length=sequence_length,
        phase=phase,
        precision=precision,
        memory_format=memory_format,
        optimizer=optimizer,
        snapshot=snapshot,
    )
    if as_json:
        answer = [row.to_dict() for row in rows]
        print_json(answer if len(answer) > 1 else answer[0])
        return
    for row in rows:
        print_line(str(row))
    print_notes([*dict.fromkeys(text for row in rows for text in row.remarks)], explain=explain)
