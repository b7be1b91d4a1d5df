"""Importers of published sheets, each handling the known faults of its source.

Rows become `imported` measurements under a device key and a software stack of their own. A row
that yields no measurement is counted with its reason.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from research.importers import gpumemnet, milabench, node_steps, public, timm_results
from trappm.cli.labels import print_import
from trappm.cli.options import AsJson
from trappm.profiler.errors import InputError
from trappm.store import Home, Store
from trappm.store.files import ImportReport, check_size, record_rows

READERS = {
    "gpumemnet": gpumemnet.parse_rows,
    milabench.SOURCE: milabench.parse_rows,
    "timm": timm_results.parse_rows,
}
SOURCES = (*READERS, *node_steps.SOURCES, public.SOURCE)


def import_sheet(
    store: Store, path: Path, source: str, by: str | None = None, licence: str | None = None
) -> ImportReport:
    """Import a published sheet into the label store.

    Args:
        store: Label store that receives the measurements.
        path: Sheet; timm's sheets keep their file names, which tell what was measured.
        source: Name of the publication, one of SOURCES.
        by: Who measured, of a file that was sent in.
        licence: Its licence.

    Raises:
        InputError: The source is unknown or a row cannot be read; nothing was recorded.
        StoreError: The store cannot be written; importing again completes it.
    """
    if source not in SOURCES:
        raise InputError(f"Unknown source {source!r}. Expected one of: {', '.join(SOURCES)}")
    if source == public.SOURCE:
        made = partial(public.parse_rows, path, by, licence)
        return record_rows(store.measurements.record_many, path.name, by or source, made)
    if by is not None or licence is not None:
        raise InputError(f"--by and --licence are for --source {public.SOURCE}; leave them out")
    read = READERS.get(source)
    rows = node_steps.parse_rows(path, source) if read is None else read(path)
    return record_rows(store.measurements.record_many, path.name, source, lambda: rows)


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Published sheet.")],
    source: Annotated[
        str,
        typer.Option(help=f"Publication: {', '.join(SOURCES)} (trappm labels export --public)."),
    ],
    by: Annotated[str | None, typer.Option(help="Who measured, of a public file.")] = None,
    licence: Annotated[str | None, typer.Option(help="Licence of a public file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Import a published sheet into the label store; one unreadable row refuses the whole file."""
    check_size(file)  # before a store is made
    with Store.open(Home.open().database_url) as store:
        print_import(import_sheet(store, file, source, by, licence), as_json)
