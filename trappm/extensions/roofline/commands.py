"""`trappm device show`: the roofline of devices, and the kernels of a step under it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from trappm.cli import device, options, shell
from trappm.cli.options import AsJson, BatchSize, InputSize, print_json
from trappm.prediction.device_names import DEFAULT_DEVICE
from trappm.profiler.devices.rank_keys import rank_key
from trappm.profiler.errors import InputError


def register(_app: typer.Typer) -> None:
    """Add `show` to the group of commands about devices."""
    device.app.command(
        epilog="Example: trappm device show v100 a100 --model resnet50 --batch-size 64"
    )(show)


def show(
    devices: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DEVICE",
            help="Device keys (default: list all; with --model: a100-40gb).",
            autocompletion=shell.devices,
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="timm architecture or ONNX file whose step to show.")
    ] = None,
    batch_size: BatchSize = None,
    input_size: InputSize = None,
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
    """Show what devices reach, and what bounds a model's step on them: their rooflines.

    Ceilings are those that kernels reached where they were timed, else of the card's data sheet.
    """
    from trappm.extensions.roofline.drawing import draw_png
    from trappm.extensions.roofline.report import devices_json, print_rooflines
    from trappm.extensions.roofline.roofs import known_device
    from trappm.label_store import store_or_none_yet
    from trappm.prediction.parallel.known_links import link_of, link_sentence
    from trappm.store import Home
    from trappm.terminal.plots import require_matplotlib
    from trappm.terminal.tables import print_table

    if png is not None:
        require_matplotlib("--png")
    is_default = not devices and model is not None
    devices = [DEFAULT_DEVICE] if is_default else devices
    of_ranks = [name for name in devices or () if rank_key(name).ranks > 1]
    if of_ranks and of_ranks == devices and (png is not None or model is not None):
        raise InputError(
            f"{', '.join(of_ranks)}: a roofline is of one device; name that whose ranks these are"
        )
    with store_or_none_yet(Home.find()) as store:
        if not devices:
            counts = store.kernels.devices()
            if as_json:
                print_json(counts)
            else:
                rows = [*counts.items()]
                print_table("devices of which kernels are known", ("device", "kernels"), rows)
            return
        known = [known_device(store, name) for name in devices if rank_key(name).ranks == 1]
        links = {name: store.kernels.latest(name) for name in devices if rank_key(name).ranks > 1}
    if links and not as_json:
        for name, collectives in links.items():
            typer.echo(link_sentence(name, collectives))
        if not known:
            return
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
        steps = roofed_steps(question, subject_of(model, input_size=input_size), known)
    if png is not None:
        draw_png(known, steps, png)
    if as_json:
        fitted = {name: link_of(name, collectives) for name, collectives in links.items()}
        answer = [
            {"device": name, "link": None if link is None else asdict(link)}
            for name, link in fitted.items()
        ]
        answer += devices_json(known, steps)
        print_json(answer if len(answer) > 1 else answer[0])
    else:
        print_rooflines(known, steps, is_default=is_default)
