"""`trappm estimate`: the memory of a step, what it is made of, and the largest batch that fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from trappm.cli import shell
from trappm.cli.options import AsJson, BatchSize, InputSize, Model, SequenceLength, print_json
from trappm.profiler.errors import InputError


def estimate(
    model: Model,
    batch_size: BatchSize = None,
    input_size: InputSize = None,
    sequence_length: SequenceLength = None,
    device: Annotated[
        list[str] | None,
        typer.Option(help="A card, such as v100; again for more.", autocompletion=shell.devices),
    ] = None,
    phase: Annotated[str, typer.Option(help="train or infer.")] = "train",
    precision: Annotated[str, typer.Option(help="fp32, amp-fp16, amp-bf16 or bf16.")] = "fp32",
    memory_format: Annotated[str, typer.Option(help="contiguous or channels-last.")] = "contiguous",
    optimizer: Annotated[str, typer.Option(help="sgd, momentum, adam or adamw.")] = "sgd",
    implementation: Annotated[
        str, typer.Option(help="Of the optimizer: foreach, fused or plain.")
    ] = "foreach",
    accumulation: Annotated[int, typer.Option(help="Passes before each optimizer step.")] = 1,
    depth: Annotated[int, typer.Option(min=1, max=20, help="Of the tree of modules.")] = 1,
    ray: Annotated[bool, typer.Option("--ray", help="What a Ray task asks for.")] = False,
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="A pod's YAML; without --device any card.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Estimate the GPU memory of a step: what fits, the largest batch, and what takes it.

    Simulated on PyTorch's allocator, without a GPU, labels or a trial; modules of your own by
    `trappm.estimate` in Python.

    Example: trappm estimate resnet50 --batch-size 64 --optimizer adamw --device v100
    """
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
    devices = device or ["a100"]
    if ray and kubernetes:
        raise InputError("--ray and --kubernetes are two answers; ask for one of them")
    if ray or kubernetes:
        from trappm.integrations import gpu_requests

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
        print_estimate(made, devices, depth)


def fits(
    model: Model,
    device: Annotated[
        list[str] | None,
        typer.Option(help="A card, such as v100; again for more.", autocompletion=shell.devices),
    ] = None,
    input_size: InputSize = None,
    sequence_length: SequenceLength = None,
    phase: Annotated[str, typer.Option(help="train or infer.")] = "train",
    precision: Annotated[str, typer.Option(help="fp32, amp-fp16, amp-bf16 or bf16.")] = "fp32",
    memory_format: Annotated[str, typer.Option(help="contiguous or channels-last.")] = "contiguous",
    optimizer: Annotated[str, typer.Option(help="sgd, momentum, adam or adamw.")] = "sgd",
    as_json: AsJson = False,
) -> None:
    """Find the largest batch whose step fits a card's memory.

    By bisection over the memory that PyTorch's allocator would take, simulated without a GPU.

    Example: trappm fits resnet50 --device a100 --optimizer adamw
    """
    from trappm.profiler.models.known_names import is_file, refuse_unknown

    if not is_file(model):
        refuse_unknown(model)
    from trappm.prediction.fitting import fitting
    from trappm.prediction.models.sizes import size_of
    from trappm.prediction.models.subjects import subject_of
    from trappm.terminal.tables import print_line

    rows = fitting(
        subject_of(model, input_size=size_of(model, input_size, sequence_length)),
        device or ["a100"],
        phase=phase,
        precision=precision,
        memory_format=memory_format,
        optimizer=optimizer,
    )
    if as_json:
        answer = [row.to_dict() for row in rows]
        print_json(answer if len(answer) > 1 else answer[0])
        return
    for row in rows:
        print_line(str(row))
        for remark in row.remarks:
            print_line(remark, style="dim")
