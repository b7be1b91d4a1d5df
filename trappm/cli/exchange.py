"""`trappm labels export` and `import`: labels to and from files, and what others published."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trappm.cli.options import AsJson, print_json


def export(
    file: Annotated[Path, typer.Argument(help="A .parquet, .csv or .jsonl file; replaced.")],
    architecture: Annotated[
        str | None, typer.Option(help="An architecture, or a glob such as 'resnet*'.")
    ] = None,
    family: Annotated[str | None, typer.Option(help="A family, such as resnet.")] = None,
    device: Annotated[str | None, typer.Option(help="A device key, such as cpu-2t.")] = None,
    phase: Annotated[str | None, typer.Option(help="train or infer.")] = None,
    protocol: Annotated[str | None, typer.Option(help="A protocol's name, such as paper.")] = None,
    provenance: Annotated[str | None, typer.Option(help="measured, imported or simulated.")] = None,
    campaign: Annotated[str | None, typer.Option(help="A campaign's id.")] = None,
    outcome: Annotated[
        str | None,
        typer.Option(help="Attempts that ended so (oom, timeout, ... or any), not labels."),
    ] = None,
    since: Annotated[str | None, typer.Option(help="A date, a time, or an age such as 7d.")] = None,
    until: Annotated[str | None, typer.Option(help="As --since; a date to its end.")] = None,
) -> None:
    """Write labels into a file, each with its whole measurement."""
    from store import LabelFilter
    from store.exchange import export_file
    from trappm.asking import store_to_read

    wanted = LabelFilter(
        architecture=architecture,
        family=family,
        device=device,
        phase=phase,
        protocol=protocol,
        provenance=provenance,
        campaign=campaign,
        outcome=outcome,
        since=since,
        until=until,
    )
    with store_to_read() as store:
        count = export_file(store.each_measurement(wanted), file)
    what = "labels" if outcome is None else "attempts"
    typer.echo(f"{count} {what} written to {file}")


def import_(
    file: Annotated[Path, typer.Argument(help="An export, JSON lines of the profiler, a sheet.")],
    source: Annotated[
        str | None, typer.Option(help="Of a published sheet: gpumemnet or timm.")
    ] = None,
    check_models: Annotated[
        bool,
        typer.Option(
            "--check-models", help="gpumemnet: compare each row with timm's model (slow)."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Record what stands in a file; one bad row refuses it whole, and twice changes nothing."""
    from store import Home, Store
    from store.importers import import_file
    from trappm.tables import print_table

    with Store.open(Home.open().database_url) as store:
        report = import_file(store, file, source=source, check_models=check_models)
    rows = [(kind, count, reason) for (kind, reason), count in report.reasons.items()]
    if as_json:
        reasons = [dict(zip(("kind", "rows", "reason"), row, strict=True)) for row in rows]
        print_json({**vars(report), "reasons": reasons})
    else:
        title = f"{report.file} ({report.source}): {report.rows} rows, {report.new} new attempts"
        print_table(title, ("became", "rows", "because"), rows)
