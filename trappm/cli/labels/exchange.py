"""`trappm labels export`, `import` and `add`: labels to and from files, others' and trainings'."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trappm.cli.labels.filters import with_filter
from trappm.cli.options import AsJson, print_json

if TYPE_CHECKING:
    from trappm.store import LabelFilter
    from trappm.store.exchange.files import ImportReport


@with_filter
def export(
    wanted: LabelFilter,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A .parquet, .csv or .jsonl file; replaced.")
    ],
) -> None:
    """Write labels into a file, each with its whole measurement."""
    from trappm.label_frames import store_to_read
    from trappm.store.exchange.files import export_file

    with store_to_read() as store:
        store.labels.query(wanted, columns=["id"], sort="id", limit=1)  # refuses unknown names
        count = export_file(store.measurements.each(wanted), file)
    what = "labels" if wanted.outcome is None else "attempts"
    typer.echo(f"{count} {what} written to {file}")


def import_(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="An export, or JSON lines of the profiler.")
    ],
    as_json: AsJson = False,
) -> None:
    """Record what stands in a file; one bad row refuses it whole, and twice changes nothing.

    Published sheets of others: python -m research import FILE --source NAME
    """
    _imported(file, None, as_json)


def add(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="JSON lines that a callback recorded.")
    ],
    as_json: AsJson = False,
) -> None:
    """Record what steps of your trainings took; one bad line refuses the file, twice is once.

    They stand apart from what was measured alone: no head learns from them.
    """
    from trappm.profiler.records.step_scope import IN_TRAINING

    _imported(file, IN_TRAINING, as_json)


def _imported(file: Path, source: str | None, as_json: bool) -> None:
    from trappm.store import Home, Store
    from trappm.store.exchange.files import checked_size
    from trappm.store.exchange.importing import import_file

    checked_size(file)  # before a store is made
    with Store.open(Home.open().database_url) as store:
        report = import_file(store, file, source=source)
    print_import(report, as_json)


def print_import(report: ImportReport, as_json: bool) -> None:
    """Print how many rows of an imported file became what."""
    from trappm.terminal.tables import print_table

    rows = [(kind, count, reason) for (kind, reason), count in report.reasons.items()]
    if as_json:
        reasons = [dict(zip(("kind", "rows", "reason"), row, strict=True)) for row in rows]
        print_json({**vars(report), "reasons": reasons})
    else:
        title = f"{report.file} ({report.source}): {report.rows} rows, {report.new} new attempts"
        print_table(title, ("became", "rows", "reason"), rows)
