"""Options and small tools that several commands share."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]

Model = Annotated[str, typer.Argument(help="A timm architecture, or an ONNX file.")]
BatchSize = Annotated[
    int | None, typer.Option(help="Samples a step; by default the file's own, or 1.")
]
InputSize = Annotated[int | None, typer.Option(help="Pixels; by default the architecture's own.")]

Processes = Annotated[
    int | None,
    typer.Option(min=1, max=1024, help="How many here; by default one for each core."),
]
RetryRefused = Annotated[
    bool, typer.Option("--retry-refused", help="Try again what an earlier version refused.")
]

# Filters of labels: what each lets pass stands in `store.LabelFilter`.
Architecture = Annotated[
    str | None, typer.Option(help="An architecture, or a glob such as 'resnet*'.")
]
Family = Annotated[str | None, typer.Option(help="A family, such as resnet.")]
Device = Annotated[str | None, typer.Option(help="A device key, such as cpu-2t.")]
SampleCount = Annotated[int | None, typer.Option("--batch-size", min=1, help="Samples a step.")]
Pixels = Annotated[int | None, typer.Option("--input-size", min=1, help="Pixels.")]
Precision = Annotated[str | None, typer.Option(help="fp32, amp-fp16 or amp-bf16.")]
MemoryFormat = Annotated[str | None, typer.Option(help="contiguous or channels-last.")]
Optimizer = Annotated[str | None, typer.Option(help="sgd, momentum or adam.")]
Metric = Annotated[str | None, typer.Option(help="Only labels that have it, such as power_w.")]
Phase = Annotated[str | None, typer.Option(help="train or infer.")]
Protocol = Annotated[str | None, typer.Option(help="A protocol's name, such as paper.")]
Provenance = Annotated[str | None, typer.Option(help="measured, imported or simulated.")]
Campaign = Annotated[str | None, typer.Option(help="A campaign's id.")]
Outcome = Annotated[
    str | None,
    typer.Option(help="Attempts that ended so (oom, timeout, ... or any), instead of labels."),
]
Since = Annotated[
    str | None, typer.Option(help="A date (2026-11-21), a time, or an age (30m, 12h, 7d, 2w).")
]
Until = Annotated[str | None, typer.Option(help="As --since; a date to its end.")]


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))
