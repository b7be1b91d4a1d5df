"""`trappm labels export`, `import` and `add`: labels to and from files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trappm.cli.labels.filters import with_filter
from trappm.cli.options import AsJson, print_json

if TYPE_CHECKING:
    from trappm.store import LabelFilter
    from trappm.store.files import ImportReport


@with_filter
def export(
    wanted: LabelFilter,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help=".parquet, .csv or .jsonl file to replace.")
    ],
) -> None:
    """Write labels with their measurements into a file."""
    from trappm.label_store import store_to_read
    from trappm.store.files import export_file

    with store_to_read() as store:
        store.labels.query(wanted, columns=["id"], sort="id", limit=1)  # refuses unknown names
        count = export_file(store.measurements.each(wanted), file)
    what = "labels" if wanted.outcome is None else "attempts"
    typer.echo(f"{count} {what} written to {file}")


def import_(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="An export, or JSON lines."),
    ],
    as_json: AsJson = False,
) -> None:
    """Record the measurements in a file; one bad row refuses the file.

    Importing twice changes nothing. Steps that a callback recorded in a training are kept apart:
    no model learns from them. Published sheets: python -m research import FILE --source NAME
    """
    from trappm.store import Home, Store
    from trappm.store.files import checked_size, import_file

    checked_size(file)  # before a store is made
    with Store.open(Home.open().database_url) as store:
        report = import_file(store, file)
    print_import(report, as_json)


def print_import(report: ImportReport, as_json: bool) -> None:
    """Print the number of rows of an imported file by result and reason."""
    from trappm.terminal.tables import print_table

    rows = [(kind, count, reason) for (kind, reason), count in report.reasons.items()]
    if as_json:
        reasons = [dict(zip(("kind", "rows", "reason"), row, strict=True)) for row in rows]
        print_json({**vars(report), "reasons": reasons})
    else:
        title = f"{report.file} ({report.source}): {report.rows} rows, {report.new} new attempts"
        print_table(title, ("became", "rows", "reason"), rows)
