"""Printing a table of data for people and for machines."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trappm.cli.options import print_json
from trappm.label_store import records
from trappm.profiler.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

AsJsonLines = Annotated[bool, typer.Option("--jsonl", help="Print one JSON object a line.")]
AsCsv = Annotated[bool, typer.Option("--csv", help="Print CSV.")]
AsParquet = Annotated[Path | None, typer.Option("--parquet", help="Write this Parquet file.")]


def check_formats(as_json: bool, as_jsonl: bool, as_csv: bool, parquet: Path | None) -> bool:
    """Whether the output is for machines.

    Raises:
        InputError: more than one format is wanted, or what Parquet needs is not installed.
    """
    formats = {"--json": as_json, "--jsonl": as_jsonl, "--csv": as_csv, "--parquet": bool(parquet)}
    names = [name for name, is_wanted in formats.items() if is_wanted]
    if len(names) > 1:
        raise InputError(f"{' and '.join(names)} exclude each other; choose one")
    if parquet is not None:
        _check_parquet(parquet)
    return bool(names)


def print_frame(
    frame: pd.DataFrame, *, as_json: bool, as_jsonl: bool, parquet: Path | None
) -> None:
    """Prints or writes the frame in the format that is wanted, else as CSV.

    Numbers keep all their digits, times are in ISO 8601, what is missing is null or empty.

    Raises:
        InputError: the Parquet file cannot be written.
    """
    if parquet is not None:
        _write_parquet(frame, parquet)
        return
    frame = frame.copy(deep=False)
    for name in frame.select_dtypes("datetimetz"):
        frame[name] = frame[name].map(lambda time: time.isoformat())
    if as_json:
        print_json(list(records(frame)))
    elif as_jsonl:
        for record in records(frame):
            typer.echo(json.dumps(record, default=str))
    else:
        frame.to_csv(sys.stdout, index=False)


def _check_parquet(path: Path) -> None:
    if importlib.util.find_spec("pyarrow") is None:
        raise InputError("--parquet needs pyarrow; install it, or take --csv")
    if not path.parent.is_dir():
        raise InputError(f"--parquet {path}: there is no folder {path.parent}")


def _write_parquet(frame: pd.DataFrame, path: Path) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")  # never half a file under its name
    try:
        frame.to_parquet(part, index=False)
        part.replace(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)
    typer.echo(f"{len(frame)} rows written to {path}")
