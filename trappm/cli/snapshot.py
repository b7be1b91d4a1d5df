"""`trappm snapshot`: show, pull and push published snapshots, and their aliases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trappm.cli import shell
from trappm.cli.options import AsJson, print_json
from trappm.terminal.tables import minute, print_line, print_table

if TYPE_CHECKING:
    from trappm.learner.snapshots.manifest import Manifest
    from trappm.snapshots import SnapshotListing

app = typer.Typer(
    help="Show, pull and push snapshots, and name them by aliases.",
    no_args_is_help=True,
    epilog="Example: trappm snapshot pull --from s3://bucket/snapshots",
)

Name = Annotated[
    str,
    typer.Argument(
        metavar="SNAPSHOT", help="Id, its beginning, or an alias.", autocompletion=shell.snapshots
    ),
]
Remote = Annotated[
    str | None,
    typer.Option("--registry", envvar="TRAPPM_REGISTRY", help="Folder or URL (s3://, gs://, ...)."),
]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        "--registry",
        envvar="TRAPPM_REGISTRY",
        help="Registry: folder or URL (s3://, gs://, ...).",
    ),
]
Registry = Annotated[
    str | None,
    typer.Option("--registry", help="Folder or URL (default: the snapshots of TRAPPM_HOME)."),
]


@app.command(epilog="Example: trappm snapshot show default")
def show(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="SNAPSHOT",
            help="Id, its beginning, or an alias (default: list all).",
            autocompletion=shell.snapshots,
        ),
    ] = None,
    registry: Registry = None,
    as_json: AsJson = False,
) -> None:
    """List all snapshots, or show the heads, errors and labels of one, and an alias's history.

    Every file of a snapshot of this machine is checked against its manifest.
    """
    from trappm import snapshots
    from trappm.learner.snapshots.manifest import read_manifest
    from trappm.prediction.selection import find_folder

    if name is None:
        rows = snapshots.list(registry)
        if as_json:
            print_json([asdict(row) for row in rows])
        else:
            _print_listings(rows)
        return
    place = snapshots.registry_at(registry)
    if registry is None:
        folder = find_folder(name)
        manifest = read_manifest(folder)
        from trappm.learner.snapshots.snapshot import load_snapshot  # imports torch

        load_snapshot(folder)  # checks every file
    else:
        manifest = place.manifest(place.resolve(name))
    history = place.history(name) if name in place.aliases() else []
    if as_json:
        moves = [{"snapshot": x.snapshot, "at": x.at, "why": x.why} for x in history]
        print_json(manifest.to_json() | ({"alias_history": moves} if moves else {}))
        return
    print_manifest(manifest)
    if history:
        moved = [(entry.snapshot, minute(entry.at), entry.why) for entry in reversed(history)]
        print_table(f"history of {name}", ("snapshot", "since", "reason"), moved)


@app.command(epilog="Example: trappm snapshot pull --from s3://bucket/snapshots")
def pull(
    name: Name = "latest",
    registry: From = None,
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
        typer.echo(f"snapshot {name} is in {snapshots.registry_at(registry).location}")
    typer.echo(promotion.message)


def _print_listings(rows: Sequence[SnapshotListing]) -> None:
    """Print the snapshots of a registry."""
    shown = [
        (
            row.id,
            ", ".join(row.aliases),
            row.campaign,
            ", ".join(row.devices or ()),
            ", ".join(f"{n:,} {name}" for name, n in (row.training_labels or {}).items()),
            row.damage or minute(row.created_at),
        )
        for row in rows
    ]
    print_table("snapshots", ("id", "aliases", "campaign", "devices", "labels", "made"), shown)


def print_manifest(manifest: Manifest) -> None:
    """Print the heads with their errors, the labels, versions and sources of a snapshot."""
    from trappm.snapshots import head_rows, labels_by_provenance

    shown = ("device", "phase", "metric", "labels", "mape", "median_ape", "coverage")
    rows = [[row[name] for name in shown] for row in head_rows(manifest)]
    print_line(f"snapshot {manifest.id}, made {manifest.created_at}", style="bold")
    columns = ("device", "phase", "metric", "labels", "MAPE, %", "median, %", "in interval, %")
    print_table("", columns, rows)
    labels = ", ".join(f"{n:,} {name}" for name, n in labels_by_provenance(manifest).items())
    lines = {
        "errors on": manifest.split,
        "campaign": manifest.campaign,
        "parent": manifest.parent,
        "labels": f"{labels}, {manifest.training_labels.sha256[:16]}",
        "features": ", ".join(f"{k} {v}" for k, v in manifest.feature_schema.items()),
        "versions": ", ".join(f"{k} {v}" for k, v in manifest.versions.items()),
    }
    for name, value in lines.items():
        if value is not None:
            print_line(f"{name}: {value}")
    files = {x.file: x.source.partition(",")[0] for x in reversed(manifest.sources)}
    if files:  # once per file; --json has the counts per head
        print_table("learned from", ("file", "source"), sorted(files.items()))
