"""`trappm labels`: query, show, import and export."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trappm.cli import shell
from trappm.cli.options import AsJson, print_json, with_fields
from trappm.label_store import column_names, records, store_to_read, with_iso_times
from trappm.profiler.errors import InputError
from trappm.profiler.files import write_atomically
from trappm.store import LabelFilter

if TYPE_CHECKING:
    import pandas as pd

    from trappm.store.files import ImportReport

app = typer.Typer(
    help="Query, show, import and export labels.",
    no_args_is_help=True,
    epilog="Example: trappm labels query --family resnet --device cpu-2t",
)

SHOWN = 200
"""Rows of a table for people without `--limit`."""
MAX_ROWS = 1_000_000_000


_DETAILS = {
    "device": typer.Option(autocompletion=shell.devices),
    "batch_size": typer.Option(min=1),
    "input_size": typer.Option("--input-size", "--sequence-length", min=1),
    "campaign": typer.Option(autocompletion=shell.campaigns),
}
"""Options of some fields of a filter; their help is the text of the field."""


@app.command(epilog="Example: trappm labels query --where 'step_time_ms > 100' --sort -memory_mib")
@with_fields(_DETAILS)
def query(
    wanted: LabelFilter,
    columns: Annotated[str | None, typer.Option(help="Columns, separated by commas.")] = None,
    sort: Annotated[
        str | None, typer.Option(help="Column to sort by; with a leading '-' in descending order.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_ROWS, help="Maximum number of rows (default of tables: 200)."),
    ] = None,
    sql: Annotated[
        str | None, typer.Option(help="A SQL query instead of filters, on a read-only connection.")
    ] = None,
    as_json: AsJson = False,
    as_jsonl: Annotated[
        bool, typer.Option("--jsonl", help="Print one JSON object per line.")
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    parquet: Annotated[Path | None, typer.Option(help="Write this Parquet file.")] = None,
) -> None:
    """List labels: what was measured, on which device, with which result."""
    from trappm.reports.labels import print_labels, print_rows
    from trappm.terminal.tables import print_line

    for_machines = _check_formats(as_json, as_jsonl, as_csv, parquet)
    most = limit or (None if for_machines else SHOWN)
    if sql is not None:
        _refuse_others("--sql", vars(wanted) | {"columns": columns, "sort": sort})
    with store_to_read() as store:
        if sql is not None:
            frame, more = store.query_sql(sql, **({"limit": limit} if limit else {}))
        else:
            frame = store.labels.query(
                wanted,
                columns=column_names(columns),
                sort=sort or "architecture",
                limit=most and most + 1,
            )
    if sql is None:
        more = most is not None and len(frame) > most
        frame = frame.head(most) if most else frame
    cut = f"there is more than these {len(frame)}; see --limit" if more else None
    if for_machines:
        if cut is not None:
            typer.echo(f"trappm: {cut}", err=True)
        _print_frame(frame, as_json=as_json, as_jsonl=as_jsonl, parquet=parquet)
        return
    if sql is not None or columns:
        print_rows(frame)
    else:
        print_labels(frame, "labels" if wanted.outcome is None else "attempts")
    if cut is not None:
        print_line(cut, style="dim")


@app.command(epilog="Example: trappm labels show 12")
def show(
    label_id: Annotated[
        int, typer.Argument(metavar="ID", min=1, max=2**63 - 1, help="Id of a label.")
    ],
    as_json: AsJson = False,
) -> None:
    """Show everything about a label: metrics, spread, attempts, environment, raw samples."""
    with store_to_read() as store:
        label = store.labels.get(label_id)
        measurement = store.measurements.get(label.measurement_id)
        attempts = store.labels.attempts(label_id)
    if as_json:
        print_json(
            {
                **asdict(label),
                "configuration": label.configuration.to_dict(),
                "measurement": measurement.to_dict(),
                "attempts": list(records(attempts)),
            }
        )
    else:
        from trappm.reports.labels import print_label

        print_label(label, measurement, attempts)


@app.command("import", epilog="Example: trappm labels import a100.parquet")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An export, or JSON lines.")],
    as_json: AsJson = False,
) -> None:
    """Record the measurements in a file; one bad row refuses the file.

    Importing twice changes nothing. Steps that a callback recorded in a training are kept apart:
    no campaign learns from them. Published sheets: python -m research import FILE --source NAME
    """
    from trappm.store import Home, Store
    from trappm.store.files import check_size, import_file

    check_size(file)  # before a store is made
    with Store.open(Home.open().database_url) as store:
        report = import_file(store.measurements.record_many, file)
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
        print_table(title, ("result", "rows", "reason"), rows)


@app.command(epilog="Example: trappm labels export a100.parquet --device a100")
@with_fields(_DETAILS)
def export(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help=".parquet, .csv or .jsonl file to replace.")
    ],
    wanted: LabelFilter,
    public: Annotated[
        bool,
        typer.Option(
            "--public", help="Leave out what tells machines or people, and private models."
        ),
    ] = False,
) -> None:
    """Write labels with their measurements into a file.

    With --public, the file can be sent in: it has the measured labels, each with its configuration,
    device name, versions, settings, figures and how reliable they are.
    """
    from trappm.store.files import export_file
    from trappm.store.public_labels import public_labels

    if public:
        _refuse_others("--public", {"outcome": wanted.outcome, "provenance": wanted.provenance})
    with store_to_read() as store:
        store.labels.query(wanted, columns=["id"], sort="id", limit=1)  # refuses unknown names
        measurements = store.measurements.each(wanted)
        count = export_file(public_labels(measurements) if public else measurements, file)
        left_out = store.labels.count(wanted, at_most=MAX_ROWS) - count if public else 0
    typer.echo(f"{count} {'labels' if wanted.outcome is None else 'attempts'} written to {file}")
    if left_out:
        typer.echo(f"{left_out} left out: not measured by TraPPM, or of private models")


def _refuse_others(option: str, others: Mapping[str, object]) -> None:
    """Raise InputError if an option is given that another one excludes."""
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise InputError(f"{option} and --{given[0].replace('_', '-')} exclude each other")


def _check_formats(as_json: bool, as_jsonl: bool, as_csv: bool, parquet: Path | None) -> bool:
    """Return whether the output is for machines.

    Raises:
        InputError: More than one format is given, or Parquet cannot be written.
    """
    formats = {"--json": as_json, "--jsonl": as_jsonl, "--csv": as_csv, "--parquet": parquet}
    names = [name for name, value in formats.items() if value]
    if len(names) > 1:
        raise InputError(f"{' and '.join(names)} exclude each other; choose one")
    if parquet is not None:
        if importlib.util.find_spec("pyarrow") is None:
            raise InputError("--parquet needs pyarrow; install it, or take --csv")
        if not parquet.parent.is_dir():
            raise InputError(f"--parquet {parquet}: there is no folder {parquet.parent}")
    return bool(names)


def _print_frame(
    frame: pd.DataFrame, *, as_json: bool, as_jsonl: bool, parquet: Path | None
) -> None:
    """Print or write a frame, by default as CSV.

    Numbers keep all their digits, times are in ISO 8601, missing values are null or empty.
    """
    if parquet is not None:
        try:
            with write_atomically(parquet, replace=True) as part:  # an existing file stays whole
                frame.to_parquet(part, index=False)
        except OSError as error:
            raise InputError(f"cannot write {parquet}: {error.strerror or error}") from error
        typer.echo(f"{len(frame)} rows written to {parquet}")
        return
    frame = with_iso_times(frame)
    if as_json:
        print_json(list(records(frame)))
    elif as_jsonl:
        for record in records(frame):
            typer.echo(json.dumps(record, default=str))
    else:
        frame.to_csv(sys.stdout, index=False)
