"""`trappm store`: keep the label store whole."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trappm.cli.options import AsJson, Processes, RetryRefused, print_json

if TYPE_CHECKING:
    from trappm.profiler.records import Pair
    from trappm.store import Store

app = typer.Typer(
    help="Upgrade, check, mend, profile, count, back up and restore the label store.",
    no_args_is_help=True,
    epilog="Example: trappm store check",
)

Database = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Another label store than TRAPPM_DATABASE or the data folder's: a URL, such as "
        "postgresql+psycopg://user@host/labels; leave the password to ~/.pgpass or PGPASSWORD.",
    ),
]


@app.command(epilog="Example: trappm store upgrade")
def upgrade(
    processes: Processes = None, database: Database = None, as_json: AsJson = False
) -> None:
    """Bring the store to this version: its schema, and profiles that an earlier one made.

    A SQLite file is copied first. Profiles take about a second each; stopped or killed, the same
    command goes on where it was.
    """
    from trappm.store import Store
    from trappm.store.maintenance.upgrade import upgrade_store

    done = upgrade_store(_url(database))
    with Store.open(_url(database)) as store:
        outdated = store.workloads.outdated()
        if outdated:
            _make_profiles(store, outdated, processes)
    if as_json:
        print_json({**asdict(done), "profiles_made": len(outdated)})
        return
    if done.before != done.after:
        if done.backup is not None:
            typer.echo(f"as it was, it is kept in {done.backup}")
        before = "an empty database" if done.before is None else f"schema {done.before}"
        typer.echo(f"{done.address} upgraded from {before} to schema {done.after}")
    elif not outdated:
        typer.echo(f"{done.address} has schema {done.after}, the newest; nothing to do")
    if outdated:
        typer.echo(f"{len(outdated):,} profiles of an earlier version were made anew")


@app.command(epilog="Example: trappm store check")
def check(database: Database = None, as_json: AsJson = False) -> None:
    """Look for damage, orphans, impossible values and contradictions; change nothing.

    Exit status 0: nothing was found; 1: something was; each finding says how to mend it.
    """
    from trappm.store import Store

    with Store.open_to_read(_url(database)) as store:
        findings = store.maintenance.check()
        where = store.address
    if as_json:
        print_json([asdict(finding) for finding in findings])
    elif findings:
        for finding in findings:
            typer.echo(f"{finding.count:,} {finding.what}; such as: {finding.example}")
            typer.echo(f"  mend: {finding.mend}")
            if finding.sql is not None:
                typer.echo(f"  all of them: {finding.sql}")
    else:
        typer.echo(f"{where}: nothing is wrong")
    if findings:
        raise typer.Exit(1)


@app.command(epilog="Example: trappm store backup before.db && trappm store mend")
def mend(database: Database = None, as_json: AsJson = False) -> None:
    """Make labels that are wrong or lost again from what was measured, all or nothing.

    Exit status 0: nothing is wrong any more; 1: something else is; see `store check`.
    """
    from trappm.profiler.errors import StoreError
    from trappm.store import Store

    url = _url(database)
    Store.open_to_read(url).close()  # or there is none, and none is made
    with Store.open(url) as store:
        done = store.maintenance.relabel()
        faults = store.maintenance.check()
        where = store.address
    if as_json:
        print_json(asdict(done))
    else:
        typer.echo(f"{where}: {done.wrong:,} labels were wrong, {done.made:,} are made again")
    if faults:
        raise StoreError(
            f"{sum(finding.count for finding in faults):,} faults are left that labels made again "
            "do not mend; see what they are: trappm store check"
        )


@app.command(epilog="Example: trappm store profile --device a100-40gb --limit 50")
def profile(
    device: Annotated[
        str | None, typer.Option(help="Only of what has labels on this device, such as a100.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="So many at most.")] = None,
    processes: Processes = None,
    retry_refused: RetryRefused = False,
    database: Database = None,
) -> None:
    """Make the graphs of labelled architectures that have none, so that a file finds its labels.

    About a second each. Stopped or killed, the same command goes on where it was.
    """
    from trappm.store import Store

    url = _url(database)
    with Store.open_to_read(url) as store:  # or there is none, and none is made
        pairs = store.labels.pairs(device)
    with Store.open(url) as store:
        missing = store.workloads.pairs_to_profile(pairs, also_refused=retry_refused)[:limit]
        _make_profiles(store, missing, processes, retry_refused=retry_refused)
        graphs = store.workloads.graph_templates(pairs)
        missing_count = len(store.workloads.pairs_to_profile(pairs))
    impossible = len(pairs) - len(graphs) - missing_count
    typer.echo(
        f"{len(graphs):,} of {len(pairs):,} labelled architectures have a graph; "
        f"{missing_count:,} are still to be made, {impossible:,} cannot"
    )


def _make_profiles(
    store: Store, pairs: Sequence[Pair], processes: int | None, *, retry_refused: bool = False
) -> None:
    """Makes static profiles in processes of this machine, and shows how far it is."""
    from trappm.cluster.pool_file import make_profiles
    from trappm.reports.pools import BuildDisplay

    display = BuildDisplay()
    try:
        with display:
            make_profiles(
                store,
                pairs,
                address=None,
                processes=processes or len(os.sched_getaffinity(0)),
                watch=display.show,
                retry_refused=retry_refused,
            )
    except KeyboardInterrupt as interrupt:
        typer.echo(f"trappm: interrupted{display.how_far}; the same command goes on", err=True)
        raise typer.Exit(130) from interrupt


@app.command(epilog="Example: trappm store stats --json")
def stats(database: Database = None, as_json: AsJson = False) -> None:
    """Count rows, labels and bytes."""
    from trappm.store import Store

    with Store.open_to_read(_url(database)) as store:
        facts = store.maintenance.stats()
    if as_json:
        print_json(asdict(facts))
        return
    from trappm.terminal.tables import print_table

    a_label = "" if facts.bytes_per_label is None else f", {facts.bytes_per_label:,.0f} a label"
    print_table(
        f"{facts.address}: schema {facts.schema}, {facts.size_bytes:,} bytes{a_label}",
        ("table", "rows"),
        list(facts.rows.items()),
    )
    typer.echo()
    print_table("", ("of", "oldest", "newest"), [
        ("measurements", _second(facts.oldest_measurement), _second(facts.newest_measurement)),
        ("labels", _second(facts.oldest_label), _second(facts.newest_label)),
    ])  # fmt: skip
    columns = ("device", "provenance", "protocol", "labels", "censored")
    rows = [tuple(asdict(count)[name] for name in columns) for count in facts.labels]
    if rows:
        typer.echo()
        print_table("", columns, rows)


def _second(moment: str | None) -> str | None:
    """A moment of ISO 8601 as people write it, in UTC."""
    return None if moment is None else f"{moment[:19].replace('T', ' ')} UTC"


@app.command(epilog="Example: trappm store backup labels-of-today.db")
def backup(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A new file; nothing is ever overwritten.")
    ],
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Copy the store, as it is now, into one SQLite file; campaigns may go on meanwhile."""
    from trappm.store.maintenance.backup import back_up

    done = back_up(_url(database), file)
    if as_json:
        print_json(asdict(done))
    else:
        size = f"{done.rows:,} rows, {done.size_bytes:,} bytes"
        typer.echo(f"{done.file}: schema {done.schema}, {size}, checked")


@app.command(epilog="Example: trappm store restore today.db --database URL-OF-AN-EMPTY-DATABASE")
def restore(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A backup, or any SQLite label store.")
    ],
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Load a backup into an empty database, all or nothing; SQLite or PostgreSQL."""
    from trappm.store import Home
    from trappm.store.maintenance.restore import restore as load

    done = load(file, Home.open().database_url if database is None else database)
    if as_json:
        print_json(asdict(done))
    else:
        typer.echo(f"{done.address}: schema {done.schema}, {done.rows:,} rows restored")


def _url(database: str | None) -> str:
    if database is not None:
        return database
    from trappm.store import Home

    return Home.find().database_url
