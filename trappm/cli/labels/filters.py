"""The options that choose labels: one for each field of `store.LabelFilter`, for every command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from trappm.cli.options import with_options

if TYPE_CHECKING:
    from trappm.store import LabelFilter


def _text(help_: str) -> Any:
    return Annotated[str | None, typer.Option(help=help_)]


def _whole(help_: str) -> Any:
    return Annotated[int | None, typer.Option(min=1, help=help_)]


_OPTIONS = {
    "architecture": _text("An architecture, or a glob such as 'resnet*'."),
    "family": _text("A family, such as resnet."),
    "device": _text("A device key, such as cpu-2t."),
    "batch_size": _whole("Samples a step."),
    "input_size": Annotated[
        int | None,
        typer.Option(
            "--input-size", "--sequence-length", min=1, help="Pixels, or tokens of hf: names."
        ),
    ],
    "precision": _text("fp32, amp-fp16, amp-bf16 or bf16."),
    "memory_format": _text("contiguous or channels-last."),
    "optimizer": _text("sgd, momentum, adam or adamw."),
    "phase": _text("train or infer."),
    "protocol": _text("A protocol's name, such as paper."),
    "metric": _text("Only labels that have it, such as power_w."),
    "outcome": _text("Attempts that ended so (oom, timeout, ... or any), instead of labels."),
    "provenance": _text("measured, imported or simulated."),
    "campaign": _text("A campaign's id, or its beginning."),
    "since": _text("A date (2026-11-21), a time, or an age (30m, 12h, 7d, 2w)."),
    "until": _text("As --since; a date to its end."),
}


def _filter(**values: Any) -> LabelFilter:
    from trappm.store import LabelFilter

    return LabelFilter(**values)


with_filter = with_options("wanted", _OPTIONS, _filter)
"""Gives a command the options that choose labels; it gets a `LabelFilter` as `wanted`."""
