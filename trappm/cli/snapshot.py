"""`trappm snapshot`: list, show, pull, push and name published snapshots."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trappm.cli import shell
from trappm.cli.options import AsJson, print_json

app = typer.Typer(
    help="List, show, pull, push and name published snapshots.",
    no_args_is_help=True,
    epilog="Example: trappm snapshot pull latest --registry s3://bucket/snapshots",
)

Name = Annotated[
    str,
    typer.Argument(
        metavar="SNAPSHOT",
        help="An id, its beginning, or an alias.",
        autocompletion=shell.snapshots,
    ),
]
Remote = Annotated[
    str | None,
    typer.Option(
        "--registry", envvar="TRAPPM_REGISTRY", help="A folder or URL (s3://, gs://, ...)."
    ),
]
Registry = Annotated[
    str | None,
    typer.Option("--registry", help="A folder or URL (default: the snapshots of TRAPPM_HOME)."),
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
    """Show what a snapshot holds: heads, errors, labels, versions.

    Every file of a snapshot of this machine is checked against its manifest.
    """
    from trappm import snapshots
    from trappm.learner.snapshots.snapshot import load_snapshot
    from trappm.prediction.snapshot_choice import folder_of
    from trappm.terminal.snapshot_tables import print_manifest

    manifest = snapshots.manifest_of(name, registry)
    if registry is None:
        load_snapshot(folder_of(name))
    if as_json:
        print_json(manifest.to_json())
    else:
        print_manifest(manifest)


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
    alias: Annotated[str, typer.Option(help="Alias to move, unless it regressed.")] = "latest",
    bound: Annotated[
        float, typer.Option(min=0, help="Increase of an error that is a regression, in percent.")
    ] = 20.0,
) -> None:
    """Publish a snapshot of this machine, or a folder, in a registry.

    One that regressed is published, but the alias stays where it is.
    """
    from trappm import snapshots

    if registry is None:
        raise typer.BadParameter("name where to publish it: --registry, or TRAPPM_REGISTRY")
    promotion = snapshots.push(name, registry, alias, max_regression_percent=bound)
    typer.echo(f"snapshot {snapshots.manifest_of(name).id} is in {registry}")
    typer.echo(promotion.message)


@app.command(epilog="Example: trappm snapshot alias stable latest")
def alias(
    name: Annotated[str | None, typer.Argument(metavar="ALIAS", help="A name.")] = None,
    snapshot: Annotated[
        str | None, typer.Argument(metavar="SNAPSHOT", help="What it is to mean.")
    ] = None,
    registry: Registry = None,
    as_json: AsJson = False,
) -> None:
    """Show what aliases mean, show the history of one, or move one to a snapshot."""
    from trappm import snapshots

    shared = snapshots.registry_at(registry)
    if name is not None and snapshot is not None:
        snapshots.check_alias(name)
        entry = shared.set_alias(name, shared.resolve(snapshot), "by hand")
        typer.echo(f"{name} is {entry.snapshot}")
        return
    if name is None:
        rows = [{"alias": key, "snapshot": value} for key, value in shared.aliases().items()]
    else:
        rows = [
            {"alias": name, "snapshot": x.snapshot, "at": x.at, "why": x.why}
            for x in shared.history(name)
        ]
    if as_json:
        print_json(rows)
    else:
        for row in rows:
            typer.echo("  ".join(row.values()))
