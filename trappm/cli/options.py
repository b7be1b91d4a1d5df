"""Options that several commands share."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer
from typer.models import OptionInfo

from trappm.cli import shell
from trappm.profiler.records import OPTIMIZER_NAMES, PRECISION_NAMES

_T = TypeVar("_T")


def with_fields(
    details: Mapping[str, OptionInfo] = {},
) -> Callable[[Callable[..., _T]], Callable[..., _T]]:
    """Give a command an option per field of its parameters that are dataclasses, in their place.

    Args:
        details: Options of some fields; the text in a field's annotation is the help of its option.
    """

    def decorate(command: Callable[..., _T]) -> Callable[..., _T]:
        groups: dict[str, Any] = {}
        parameters = list[inspect.Parameter]()
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
            if not is_dataclass(parameter.annotation):
                parameters.append(parameter)
                continue
            groups[name] = parameter.annotation
            hints = get_type_hints(groups[name], include_extras=True)
            for field in inspect.signature(groups[name]).parameters.values():
                option = _option(hints[field.name], details.get(field.name))
                parameters.append(field.replace(annotation=option))

        @wraps(command)
        def flat(**given: Any) -> _T:
            for name, group in groups.items():
                own = {field.name: given.pop(field.name) for field in fields(group)}
                given[name] = group(**own)
            return command(**given)

        flat.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
        )
        return flat

    return decorate


def _option(hint: Any, details: OptionInfo | None) -> Any:
    """Return the annotation of an option for a field's; an option in it stays as it is."""
    kind, annotation = get_args(hint)
    if isinstance(annotation, OptionInfo):
        return hint
    option = copy(details or typer.Option())
    option.help = annotation
    return Annotated[kind, option]


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]

Explain = Annotated[
    bool, typer.Option("--explain", help="Show all remarks, and what the answer is based on.")
]

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A timm architecture, an hf: name, package.module:function, or an ONNX file.",
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
Phase = Annotated[str, typer.Option(help="train or infer.")]
SnapshotName = Annotated[
    str | None,
    typer.Option(
        "--snapshot",
        help="Id, alias, folder or registry (default: the device's latest, then default).",
        autocompletion=shell.snapshots,
    ),
]

Processes = Annotated[
    int | None,
    typer.Option(
        min=1, max=1024, help="Number of processes on this machine (default: one per core)."
    ),
]
RetryRefused = Annotated[
    bool, typer.Option("--retry-refused", help="Try again what an earlier version refused.")
]


@dataclass(kw_only=True)
class SizeOptions:
    """Options for the size of a model's input."""

    input_size: Annotated[
        int | None, typer.Option(help="Pixels (default: the architecture's own).")
    ] = None
    sequence_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens, of text files and hf: names (default: the model's maximum, up to 2048)."
        ),
    ] = None


@dataclass(kw_only=True)
class SettingOptions:
    """Options for the settings of a step."""

    precision: Annotated[
        str | None, typer.Option(help=f"{PRECISION_NAMES} (default: most labels').")
    ] = None
    memory_format: Annotated[
        str | None, typer.Option(help="contiguous or channels-last (default: most labels').")
    ] = None
    optimizer: Annotated[
        str | None, typer.Option(help=f"{OPTIMIZER_NAMES} (default: most labels').")
    ] = None


@dataclass(kw_only=True)
class RunOptions:
    """Options for a whole run, with the names of `QuestionSettings`."""

    epochs: Annotated[
        int | None,
        typer.Option(
            help="Number of epochs of a whole run, without data loading; needs --samples."
        ),
    ] = None
    samples: Annotated[int | None, typer.Option(help="Number of training samples per epoch.")] = (
        None
    )
    carbon_g_per_kwh: Annotated[
        float | None,
        typer.Option("--carbon", help="Carbon intensity of the electricity (g CO2/kWh)."),
    ] = None
    power_limit_w: Annotated[
        float | None,
        typer.Option("--power-limit", help="GPU power limit in watts (default: factory setting)."),
    ] = None
    usd_per_hour: Annotated[
        float | None,
        typer.Option(
            "--price", help="USD per hour of the device (default: known prices of clouds)."
        ),
    ] = None


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))
