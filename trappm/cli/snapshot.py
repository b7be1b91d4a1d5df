"""`trappm snapshot`: what has been published, and how to take it along."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trappm.cli.options import AsJson, print_json

app = typer.Typer(
    help="List and pull published snapshots.",
    no_args_is_help=True,
    epilog="Example: trappm snapshot pull --to my-snapshot",
)


@app.command("list", epilog="Example: trappm snapshot list")
def list_snapshots(as_json: AsJson = False) -> None:
    """List the snapshots, the latest first."""
    from store import Home
    from trappm import report
    from trappm.asking import store_or_none_yet

    with store_or_none_yet(Home.find()) as store:
        rows = report.snapshot_rows(store)
    if as_json:
        print_json(rows)
    else:
        report.print_snapshots(rows)


@app.command(epilog="Example: trappm snapshot pull --to my-snapshot")
def pull(
    to: Annotated[Path, typer.Option(help="The new folder to put it in.")],
    name: Annotated[str, typer.Argument(metavar="[SNAPSHOT]", help="An id or alias.")] = "latest",
) -> None:
    """Copy a snapshot, checksums verified, to a folder that predict --snapshot can use anywhere."""
    from learner.snapshot import copy_snapshot
    from store import Home
    from trappm.asking import store_or_none_yet
    from trappm.prediction import snapshot_folder

    home = Home.find()
    with store_or_none_yet(home) as store:
        source = snapshot_folder(store, home, name)
    info = copy_snapshot(source, to)
    typer.echo(f"snapshot {info.id} pulled to {to}")
    typer.echo(f"use it with: trappm predict resnet18 --batch-size 4 --snapshot {to}")
