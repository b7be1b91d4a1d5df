"""`python -m research import`: published sheets into the label store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from research.importers import SOURCES, import_sheet
from research.importers.neusight import read_neusight
from trappm.cli.labels import print_import
from trappm.cli.options import AsJson, print_json
from trappm.store import Home, Store
from trappm.store.files import checked_size


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Published sheet.")],
    source: Annotated[
        str, typer.Option(help=f"Publication: {', '.join(SOURCES)}, neusight (kernels).")
    ],
    check_models: Annotated[
        bool,
        typer.Option("--check-models", help="gpumemnet: compare rows with timm's models (slow)."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Import a published sheet into the label store; one unreadable row refuses the whole file."""
    checked_size(file)  # before a store is made
    if source == "neusight":
        count = sum(1 for _ in read_neusight(file))
        with Store.open(Home.open().database_url) as store:
            new = store.kernels.record_many(read_neusight(file))
        if as_json:
            print_json({"file": str(file), "source": source, "rows": count, "new": new})
        else:
            typer.echo(f"{file.name}: {count:,} kernels, {new:,} of them new")
        return
    with Store.open(Home.open().database_url) as store:
        report = import_sheet(store, file, source, check_models=check_models)
    print_import(report, as_json)
