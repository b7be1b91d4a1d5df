"""`trappm snapshot`: what has been published, here and elsewhere; fetching, naming, checking."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trappm.cli import shell
from trappm.cli.options import AsJson, print_json

if TYPE_CHECKING:
    from trappm.learner.snapshots.manifest_fields import Manifest
    from trappm.learner.snapshots.registry import Registry

app = typer.Typer(
    help="List, pull, push, name and check published snapshots.",
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
Location = Annotated[
    str | None,
    typer.Option(
        "--registry",
        envvar="TRAPPM_REGISTRY",
        help="A folder or URL (s3://, gs://, ...); by default the snapshots of TRAPPM_HOME.",
    ),
]
Here = Annotated[
    str | None, typer.Option("--registry", help="A folder or URL; by default TRAPPM_HOME's.")
]


@app.command("list", epilog="Example: trappm snapshot list")
def list_snapshots(registry: Here = None, as_json: AsJson = False) -> None:
    """List the snapshots of a registry, the latest first, and the one that ships with trappm."""
    from trappm.terminal.snapshot_tables import print_snapshots, snapshot_rows

    rows = snapshot_rows(_registry(registry), shipped=registry is None)
    if as_json:
        print_json([row.to_json() for row in rows])
    else:
        print_snapshots(rows)


@app.command(epilog="Example: trappm snapshot show default")
def show(name: Name = "latest", registry: Here = None, as_json: AsJson = False) -> None:
    """Show what a snapshot holds: heads, errors, labels, versions."""
    from trappm.terminal.snapshot_tables import print_manifest

    manifest = _manifest(name, registry)
    if as_json:
        print_json(manifest.to_json())
    else:
        print_manifest(manifest)


@app.command(epilog="Example: trappm snapshot pull latest --registry s3://bucket/snapshots")
def pull(
    name: Name = "latest",
    registry: Location = None,
    to: Annotated[
        Path | None, typer.Option(help="A new folder; by default among those of TRAPPM_HOME.")
    ] = None,
) -> None:
    """Fetch a snapshot, checksums verified, so that it answers without the registry.

    A name that is pulled means the same snapshot here from then on.
    """
    from trappm.learner.snapshots.manifest import read_manifest
    from trappm.learner.snapshots.snapshot import copy_snapshot
    from trappm.prediction.snapshot_choice import folder_of, local_registry

    if registry is None:
        if to is None:
            raise typer.BadParameter(
                "name what to fetch from (--registry) or where to put it (--to)"
            )
        info = copy_snapshot(folder_of(name), to)
        typer.echo(f"snapshot {info.id} copied to {to}")
    else:
        shared = _registry(registry)
        snapshot_id = shared.resolve(name)
        local = local_registry()
        place = to or Path(local.location) / snapshot_id
        if to is not None and to.exists():
            raise typer.BadParameter(f"{to} is already there; name a new folder")
        if to is not None or not local.is_whole(snapshot_id):
            shared.pull(snapshot_id, place)
        if to is None and name in shared.aliases():
            local.set_alias(name, snapshot_id, f"pulled from {shared.location}")
        typer.echo(f"snapshot {snapshot_id} pulled to {place}")
    used = str(to) if to is not None else name
    device = read_manifest(folder_of(used)).source_device
    typer.echo(f"Use it with: trappm predict resnet18 --device {device} --snapshot {used}")


@app.command(epilog="Example: trappm snapshot push latest --registry s3://bucket/snapshots")
def push(
    name: Name,
    registry: Location = None,
    alias: Annotated[
        str, typer.Option(help="The name to move to it, unless it regressed.")
    ] = "latest",
    bound: Annotated[
        float, typer.Option(min=0, help="How much worse, in %, is a regression.")
    ] = 20.0,
) -> None:
    """Publish a snapshot of this machine, or a folder, in a registry.

    One that regressed is published, but the name stays where it is.
    """
    from trappm.learner.snapshots.regressions import promote
    from trappm.prediction.snapshot_choice import folder_of

    if registry is None:
        raise typer.BadParameter("name where to publish it: --registry, or TRAPPM_REGISTRY")
    _check_alias(alias)
    shared = _registry(registry)
    snapshot_id = shared.push(folder_of(name))
    typer.echo(f"snapshot {snapshot_id} is in {shared.location}")
    typer.echo(promote(shared, alias, snapshot_id, bound).message)


@app.command(epilog="Example: trappm snapshot alias stable latest")
def alias(
    name: Annotated[str | None, typer.Argument(metavar="ALIAS", help="A name.")] = None,
    snapshot: Annotated[
        str | None, typer.Argument(metavar="SNAPSHOT", help="What it is to mean.")
    ] = None,
    registry: Here = None,
    as_json: AsJson = False,
) -> None:
    """Say what names mean, where one has been, or move one to a snapshot."""
    shared = _registry(registry)
    if name is not None and snapshot is not None:
        _check_alias(name)
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


@app.command(epilog="Example: trappm snapshot diff stable latest")
def diff(
    first: Name,
    second: Annotated[str, typer.Argument(metavar="OTHER", help="Another one.")],
    registry: Here = None,
    as_json: AsJson = False,
) -> None:
    """Say what differs between two snapshots: heads, errors, labels, versions."""
    from trappm.terminal.snapshot_tables import differences, print_differences

    rows = differences(_manifest(first, registry), _manifest(second, registry))
    if as_json:
        print_json([asdict(row) for row in rows])
    else:
        print_differences(rows)


@app.command(epilog="Example: trappm snapshot verify latest")
def verify(
    name: Annotated[
        str | None, typer.Argument(metavar="SNAPSHOT", help="By default all of them.")
    ] = None,
    registry: Here = None,
) -> None:
    """Check every byte of a snapshot, or of all, against the manifests.

    Of snapshots of this machine also that they load.
    """
    from trappm.learner.snapshots.snapshot import load_snapshot
    from trappm.prediction.snapshot_choice import DEFAULT, folder_of
    from trappm.profiler.errors import SnapshotError

    if registry is None and name is not None:
        typer.echo(f"{load_snapshot(folder_of(name)).id}: whole")
        return
    shared = _registry(registry)
    ids = shared.ids() if name is None else [shared.resolve(name)]
    faults = []
    for snapshot_id in ids:
        try:
            shared.contents(snapshot_id)
            if registry is None:
                load_snapshot(Path(shared.location) / snapshot_id)
            typer.echo(f"{snapshot_id}: whole")
        except SnapshotError as error:
            faults.append(str(error))
            typer.echo(f"{snapshot_id}: {error}")
    if registry is None:
        typer.echo(f"{load_snapshot(folder_of(DEFAULT)).id}: whole ({DEFAULT})")
    if faults:
        raise SnapshotError(f"{len(faults)} of {len(ids)} snapshots cannot be used; {faults[0]}")


@app.command(epilog="Example: trappm snapshot rollback latest")
def rollback(name: Name = "latest", registry: Here = None) -> None:
    """Move a name back to the snapshot that it meant before."""
    entry = _registry(registry).roll_back(name)
    typer.echo(f"{name} is {entry.snapshot} again")


@app.command(epilog="Example: trappm snapshot gc --keep 3 --dry-run")
def gc(
    keep: Annotated[int, typer.Option(min=0, help="So many of the newest stay.")] = 5,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    registry: Here = None,
) -> None:
    """Remove old snapshots that no name means or meant before, and what was left unfinished."""
    going = _registry(registry).collect(keep, dry_run=dry_run)
    for name in going:
        typer.echo(f"{'would remove' if dry_run else 'removed'} {name}")
    if not going:
        typer.echo("nothing to remove")


def _check_alias(alias: str) -> None:
    """Raises BadParameter for the name that always means the shipped snapshot."""
    from trappm.prediction.snapshot_choice import DEFAULT

    if alias == DEFAULT:
        raise typer.BadParameter(
            f"{DEFAULT} always means the snapshot that ships with trappm; choose another name"
        )


def _registry(location: str | None) -> Registry:
    from trappm.learner.snapshots.registry import Registry
    from trappm.prediction.snapshot_choice import local_registry

    return local_registry() if location is None else Registry(location)


def _manifest(name: str, location: str | None) -> Manifest:
    from trappm.learner.snapshots.manifest import read_manifest
    from trappm.prediction.snapshot_choice import folder_of

    if location is None:
        return read_manifest(folder_of(name))
    shared = _registry(location)
    return shared.manifest(shared.resolve(name))
