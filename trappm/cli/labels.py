"""`trappm labels`: ask the label store."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from profiler.errors import InputError
from trappm.cli.options import AsJson, print_json

app = typer.Typer(
    help="Ask the label store.",
    no_args_is_help=True,
    epilog="Example: trappm labels query --family resnet --device cpu-2t",
)


@app.command(epilog="Example: trappm labels query --family resnet --device cpu-2t --limit 5")
def query(
    architecture: Annotated[
        str | None, typer.Option(help="An architecture, or a glob such as 'resnet*'.")
    ] = None,
    family: Annotated[str | None, typer.Option(help="A family, such as resnet.")] = None,
    device: Annotated[str | None, typer.Option(help="A device key, such as cpu-2t.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1)] = None,
    input_size: Annotated[int | None, typer.Option(min=1)] = None,
    provenance: Annotated[str | None, typer.Option(help="measured, imported or simulated.")] = None,
    campaign: Annotated[str | None, typer.Option(help="A campaign's id.")] = None,
    sort: Annotated[
        str, typer.Option(help="A column; with a leading '-' the largest first.")
    ] = "architecture",
    limit: Annotated[int | None, typer.Option(min=1, help="Rows at most.")] = None,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
) -> None:
    """List labels: what was measured, on which device, with which result."""
    if as_json and as_csv:
        raise InputError("--json and --csv exclude each other; choose one")
    from store import Home, LabelFilter, Store

    wanted = LabelFilter(
        architecture=architecture,
        family=family,
        device=device,
        batch_size=batch_size,
        input_size=input_size,
        provenance=provenance,
        campaign=campaign,
    )
    with Store.open(Home.open().database_url) as store:
        frame = store.query_labels(wanted, sort=sort, limit=limit)
    if as_csv:
        frame.to_csv(sys.stdout, index=False)
    elif as_json:
        import json

        print_json(json.loads(frame.to_json(orient="records", date_format="iso")))
    else:
        from trappm.tables import print_labels

        print_labels(frame)
