"""Options and small tools that several commands share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from trappm.cli import shell

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A timm architecture, an hf: name, or an ONNX file.",
        autocompletion=shell.models,
    ),
]
BatchSize = Annotated[
    int | None, typer.Option(help="Samples a step; by default the file's own, or 1.")
]
InputSize = Annotated[int | None, typer.Option(help="Pixels; by default the architecture's own.")]
SequenceLength = Annotated[
    int | None, typer.Option(help="Tokens, of hf: names; by default the model's most, up to 2048.")
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


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))
