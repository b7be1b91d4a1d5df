"""`trappm labels`: query the label store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from trappm.cli.labels import exchange, single_label
from trappm.cli.labels.filters import with_filter
from trappm.cli.labels.formats import AsCsv, AsJsonLines, AsParquet, check_formats, print_frame
from trappm.cli.options import AsJson
from trappm.profiler.errors import InputError
from trappm.profiler.records import METRICS

if TYPE_CHECKING:
    import pandas as pd

    from trappm.store import LabelFilter

app = typer.Typer(
    help="Ask the label store.",
    no_args_is_help=True,
    epilog="Example: trappm labels query --family resnet --device cpu-2t",
)
app.command(epilog="Example: trappm labels show 12")(single_label.show)
app.command(epilog="Example: trappm labels export a100.parquet --device a100")(exchange.export)
app.command("import", epilog="Example: trappm labels import a100.parquet")(exchange.import_)

SHOWN = 200
"""Rows of a table for people, unless `--limit` says more."""

MOST_ROWS = 1_000_000_000
Limit = Annotated[
    int | None, typer.Option(min=1, max=MOST_ROWS, help="Rows at most; a table shows 200.")
]


@app.command(
    epilog="Example: trappm labels query --device cpu-2t --by family --agg count,median,p95"
)
@with_filter
def query(
    wanted: LabelFilter,
    columns: Annotated[
        str | None, typer.Option(help="Which, by commas; with --by, the metrics.")
    ] = None,
    by: Annotated[str | None, typer.Option(help="Group by these columns, by commas.")] = None,
    agg: Annotated[
        str | None,
        typer.Option(help="Statistics, by commas: count, mean, std, min, median, max, p95 ..."),
    ] = None,
    sort: Annotated[
        str | None, typer.Option(help="A column; with a leading '-' the largest first.")
    ] = None,
    limit: Limit = None,
    sql: Annotated[str | None, typer.Option(help="Ask in SQL instead; it can only read.")] = None,
    as_json: AsJson = False,
    as_jsonl: AsJsonLines = False,
    as_csv: AsCsv = False,
    parquet: AsParquet = None,
) -> None:
    """List labels: what was measured, on which device, with which result."""
    for_machines = check_formats(as_json, as_jsonl, as_csv, parquet)
    most = limit or (None if for_machines else SHOWN)
    if sql is not None:
        shaping = {"columns": columns, "by": by, "agg": agg, "sort": sort}
        frame, more = _answer_to_sql(sql, limit, vars(wanted) | shaping)
    else:
        frame = _frame(wanted, _names(columns), _names(by), _names(agg), sort, most)
        more = most is not None and len(frame) > most
        frame = frame.head(most) if most else frame
    _warn(frame, more)
    if for_machines:
        print_frame(frame, as_json=as_json, as_jsonl=as_jsonl, parquet=parquet)
    else:
        from trappm.terminal.label_tables import print_labels, print_rows

        whole = sql is None and not (by or agg or columns)
        what = "labels" if wanted.outcome is None else "attempts"
        (print_labels if whole else print_rows)(frame, what if whole else "rows")


def _frame(
    wanted: LabelFilter,
    columns: Sequence[str],
    by: Sequence[str],
    statistics: Sequence[str],
    sort: str | None,
    most: int | None,
) -> pd.DataFrame:
    """Return the labels or their statistics, with one more row than `most` if there is one."""
    from trappm.cli.labels.statistics import Statistics
    from trappm.label_store import store_to_read

    if by or statistics:
        wish = Statistics(wanted, by, statistics or ("count", "mean"), columns or (*METRICS,), sort)
        with store_to_read() as store:
            rows = store.labels.query(wanted, columns=wish.needed, sort="id")
        return wish.of(rows)
    with store_to_read() as store:
        return store.labels.query(
            wanted, columns=columns or None, sort=sort or "architecture", limit=most and most + 1
        )


def _answer_to_sql(
    sql: str, limit: int | None, others: Mapping[str, object]
) -> tuple[pd.DataFrame, bool]:
    """The rows, and whether there are more; an InputError if any other option is given."""
    from trappm.label_store import store_to_read

    if given := [name for name, value in others.items() if value is not None]:
        option = "--" + given[0].replace("_", "-")
        raise InputError(f"--sql says everything itself; {option} cannot stand beside it")
    with store_to_read() as store:
        return store.query_sql(sql, **({"limit": limit} if limit else {}))


def _warn(frame: pd.DataFrame, more: bool) -> None:
    """Says on standard error what the table does not show."""
    if censored := frame.attrs.get("censored"):
        typer.echo(
            f"trappm: {censored} labels are censored (memory ran out) and have no value here; "
            "--columns memory_above_mib is of their bounds",
            err=True,
        )
    if more:
        typer.echo(f"trappm: there is more than these {len(frame)}; see --limit", err=True)


def _names(text: str | None) -> list[str]:
    return [] if text is None else [name.strip() for name in text.split(",")]
