"""`trappm snapshot`: list, show, pull and push published snapshots, and their aliases."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trappm.cli import shell
from trappm.cli.options import AsJson, print_json

app = typer.Typer(
    help="List, show, pull and push snapshots, and name them by aliases.",
    no_args_is_help=True,
    epilog="Example: trappm snapshot pull latest --registry s3://bucket/snapshots",
)

Name = Annotated[
    str,
    typer.Argument(
        metavar="SNAPSHOT",
        help="Id, its beginning, or an alias.",
        autocompletion=shell.snapshots,
    ),
]
Remote = Annotated[
    str | None,
    typer.Option(
        "--registry",
        envvar="TRAPPM_REGISTRY",
        help="Folder or URL (s3://, gs://, ...).",
    ),
]
Registry = Annotated[
    str | None,
    typer.Option("--registry", help="Folder or URL (default: the snapshots of TRAPPM_HOME)."),
]


@app.command("list", epilog="Example: trappm snapshot list")
def list_snapshots(registry: Registry = None, as_json: AsJson = False) -> None:
    """List the snapshots of a registry, the latest first, and the one that ships with trappm."""
    from trappm import snapshots
    from trappm.terminal.snapshot_tables import print_snapshots

    rows = snapshots.list(registry)
    if as_json:
        print_json([row.to_json() for row in rows])
    else:
        print_snapshots(rows)


@app.command(epilog="Example: trappm snapshot show default")
def show(name: Name = "latest", registry: Registry = None, as_json: AsJson = False) -> None:
    """Show the heads, errors, labels and versions of a snapshot, and the history of an alias.

    Every file of a snapshot of this machine is checked against its manifest.
    """
    from trappm import snapshots
    from trappm.learner.snapshots.snapshot import load_snapshot
    from trappm.prediction.snapshot_choice import folder_of
    from trappm.terminal.snapshot_tables import print_alias, print_manifest

    manifest = snapshots.manifest_of(name, registry)
    if registry is None:
        load_snapshot(folder_of(name))
    history = snapshots.alias_history(name, registry)
    if as_json:
        moves = [{"snapshot": x.snapshot, "at": x.at, "why": x.why} for x in history]
        print_json(manifest.to_json() | ({"alias_history": moves} if moves else {}))
        return
    print_manifest(manifest)
    if history:
        print_alias(name, history)


@app.command(epilog="Example: trappm snapshot pull latest --registry s3://bucket/snapshots")
def pull(
    name: Name = "latest",
    registry: Remote = None,
    to: Annotated[
        Path | None, typer.Option(help="New folder (default: among those of TRAPPM_HOME).")
    ] = None,
) -> None:
    """Fetch a snapshot, checksums verified, so that it predicts without the registry.

    An alias that is pulled then means the same snapshot here.
    """
    from trappm import snapshots
    from trappm.learner.snapshots.manifest import read_manifest

    folder = snapshots.pull(name, registry, to)
    manifest = read_manifest(folder)
    typer.echo(f"snapshot {manifest.id} {'copied' if registry is None else 'pulled'} to {folder}")
    used = name if to is None else to
    typer.echo(
        f"Use it with: trappm predict resnet18 --device {manifest.source_device} --snapshot {used}"
    )


@app.command(epilog="Example: trappm snapshot push latest --registry s3://bucket/snapshots")
def push(
    name: Name,
    registry: Remote = None,
    alias: Annotated[
        str | None,
        typer.Option(help="Alias to create or move (default with a registry: latest)."),
    ] = None,
    bound: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Increase of an error in percent up to which the alias moves "
            "(default: 20 for latest, none for --alias).",
        ),
    ] = None,
) -> None:
    """Publish a snapshot in a registry and move an alias to it.

    Without a registry, --alias names a snapshot of this machine. Without --alias, `latest` stays
    where it is if the snapshot regressed. A repeated push changes nothing.
    """
    from trappm import snapshots

    if registry is None and alias is None:
        raise typer.BadParameter("give --alias, or where to publish: --registry or TRAPPM_REGISTRY")
    if bound is None and alias is None:
        bound = 20.0
    promotion = snapshots.push(name, registry, alias or "latest", max_regression_percent=bound)
    if registry is not None:
        typer.echo(f"snapshot {name} is in {registry}")
    typer.echo(promotion.message)
