"""The options that choose labels: one for each field of `store.LabelFilter`, for every command."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer


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


def with_filter(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options that choose labels; it gets a `LabelFilter` as `wanted`."""

    @functools.wraps(command)
    def filtered(**values: Any) -> None:
        from trappm.store import LabelFilter

        wanted = LabelFilter(**{name: values.pop(name) for name in _OPTIONS})
        command(wanted=wanted, **values)

    hints = get_type_hints(command, localns={"LabelFilter": Any}, include_extras=True)
    own = [
        p.replace(annotation=hints[p.name]) for p in inspect.signature(command).parameters.values()
    ]
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)
        for name, option in _OPTIONS.items()
    ]
    arguments = [p for p in own if p.default is p.empty and p.name != "wanted"]
    others = [p for p in own if p.default is not p.empty]
    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (*arguments, *options, *others)]
    filtered.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    filtered.__annotations__ = {p.name: p.annotation for p in parameters}  # what typer reads
    return filtered
