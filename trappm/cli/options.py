"""Options and small tools that several commands share."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))
