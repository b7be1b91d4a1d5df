"""`trappm store upgrade`: make, upgrade or check a label store."""

from __future__ import annotations

from typing import Annotated

import typer

from trappm.cli.options import AsJson, print_json

app = typer.Typer(
    help="Make, upgrade and check a label store.",
    no_args_is_help=True,
    epilog="Example: trappm store upgrade --check",
)

Database = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="SQLAlchemy URL of the label store, such as postgresql+psycopg://user@host/labels "
        "(default: TRAPPM_DATABASE, or labels.db in the data folder). Keep the password in "
        "~/.pgpass or PGPASSWORD.",
    ),
]


@app.command(epilog="Example: trappm store upgrade --check")
def upgrade(
    check: Annotated[
        bool,
        typer.Option("--check", help="Only check the schema and the integrity of the store."),
    ] = False,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Upgrade the schema of a label store, or make an empty database a label store.

    The upgrade is one transaction. End campaigns first: their leases are released.

    With --check, nothing is changed.
    The exit status is 1 if the database is damaged, or 2 if its schema is of another version.
    """
    if check:
        _check(_url(database), as_json)
        return
    from trappm.store import Store
    from trappm.store.schema import SCHEMA

    before = Store.upgrade(_url(database))
    with Store.open_to_read(_url(database)) as store:
        where = store.address
    if as_json:
        print_json({"address": where, "before": before, "schema": SCHEMA})
    elif before is None:
        typer.echo(f"{where} is a label store now, with schema {SCHEMA}")
    elif before == SCHEMA:
        typer.echo(f"{where} has the newest schema, {SCHEMA}; nothing to do")
    else:
        typer.echo(f"{where} is upgraded from schema {before} to {SCHEMA}")


def _check(url: str, as_json: bool) -> None:
    """Print the damage of a store, and exit with status 1 if there is any."""
    from trappm.store import Store

    with Store.open_to_read(url) as store:
        damage, address = store.check(), store.address
    if as_json:
        print_json(damage)
    elif damage:
        remedy = "is damaged: restore a backup, or save rows with sqlite3's .recover"
        typer.echo("\n".join([*damage, f"{address} {remedy}"]))
    else:
        typer.echo(f"{address}: no damage found")
    if damage:
        raise typer.Exit(1)


def _url(database: str | None) -> str:
    if database is not None:
        return database
    from trappm.store import Home

    return Home.find().database_url
