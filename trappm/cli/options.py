"""Options that several commands share."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from trappm.cli import shell

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]

Explain = Annotated[
    bool, typer.Option("--explain", help="Show all remarks, and what the answer is based on.")
]

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A timm architecture, an hf: name, or an ONNX file.",
        autocompletion=shell.models,
    ),
]
DeviceName = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="Device by any of its names (default: a100-40gb).",
        autocompletion=shell.devices,
    ),
]
BatchSize = Annotated[
    int | None, typer.Option(help="Samples per step (default: the file's own, or 1).")
]
InputSize = Annotated[int | None, typer.Option(help="Pixels (default: the architecture's own).")]
SequenceLength = Annotated[
    int | None,
    typer.Option(help="Tokens, of hf: names (default: the model's maximum, up to 2048)."),
]
Phase = Annotated[str, typer.Option(help="train or infer.")]
Precision = Annotated[
    str | None,
    typer.Option(help="fp32, amp-fp16, amp-bf16 or bf16 (default: most labels')."),
]
MemoryFormat = Annotated[
    str | None, typer.Option(help="contiguous or channels-last (default: most labels').")
]
Optimizer = Annotated[
    str | None, typer.Option(help="sgd, momentum, adam or adamw (default: most labels').")
]
SnapshotName = Annotated[
    str | None,
    typer.Option(
        "--snapshot",
        help="Id, alias or folder (default: the device's latest, then default).",
        autocompletion=shell.snapshots,
    ),
]

Processes = Annotated[
    int | None,
    typer.Option(min=1, max=1024, help="How many here; by default one for each core."),
]
RetryRefused = Annotated[
    bool, typer.Option("--retry-refused", help="Try again what an earlier version refused.")
]
MetricName = Annotated[str, typer.Option(help="memory, step-time, power or energy.")]
Usable = Annotated[
    Path | None,
    typer.Option(help="A sheet of architecture, batch_size, class, spike: judge usable rows."),
]
GraphProcesses = Annotated[
    int | None,
    typer.Option(min=1, max=256, help="How many make missing graphs; one for each core."),
]


def with_options(
    parameter: str, options: Mapping[str, Any], record: Callable[..., Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that gives a command options, and hands them to it as one record.

    Args:
        parameter: of the command, which gets the record.
        options: what typer reads of each option, by its name; none has a default but None.
        record: made of their values, by name.
    """

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def gathering(**values: Any) -> None:
            gathered = record(**{name: values.pop(name) for name in options})
            command(**{parameter: gathered}, **values)

        own = [p for p in inspect.signature(command).parameters.values() if p.name != parameter]
        unread = {command.__annotations__[parameter]: Any}  # it may be imported for checks only
        hints = get_type_hints(command, localns=unread, include_extras=True)
        own = [p.replace(annotation=hints[p.name], kind=p.KEYWORD_ONLY) for p in own]
        new = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)
            for name, option in options.items()
        ]
        arguments = [p for p in own if p.default is p.empty]
        parameters = [*arguments, *new, *(p for p in own if p.default is not p.empty)]
        gathering.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        gathering.__annotations__ = {p.name: p.annotation for p in parameters}  # what typer reads
        return gathering

    return decorated


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))
