"""`trappm pool`: build pools of configurations and their static profiles."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from trappm.cli.options import AsJson, Processes, RetryRefused, print_json

app = typer.Typer(
    help="Build pools of configurations.",
    no_args_is_help=True,
    epilog="Example: trappm pool build --spec examples/pool_paper.yaml",
)


@app.command(epilog="Example: trappm pool build --spec examples/pool_paper.yaml --processes 4")
def build(
    spec: Annotated[Path, typer.Option(help="A pool file (YAML).")],
    address: Annotated[
        str | None,
        typer.Option(help="A running Ray cluster, such as auto; by default processes here."),
    ] = None,
    processes: Processes = None,
    retry_refused: RetryRefused = False,
    as_json: AsJson = False,
) -> None:
    """Make all configurations of a pool file, and the static profile of every architecture in it.

    Stopped or killed, the same command continues where it stopped: no profile is made twice.
    """
    from rich.console import Console

    from trappm.cluster.pool_file import load_pool_file, make_profiles, store_pool

    file = load_pool_file(spec)
    from trappm.reports.pools import pool_facts, print_pool
    from trappm.store import Home, Store
    from trappm.terminal.progress_bars import BuildDisplay

    with Store.open(Home.open().database_url) as store:
        display = BuildDisplay(Console(stderr=True, highlight=False) if as_json else None)
        try:
            with display:
                make_profiles(
                    store,
                    store_pool(store, file),
                    address=address,
                    processes=processes or len(os.sched_getaffinity(0)),
                    retry_refused=retry_refused,
                    watch=display.show,
                )
        except KeyboardInterrupt as interrupt:
            typer.echo(
                f"trappm: interrupted{display.how_far}; the same command continues", err=True
            )
            raise typer.Exit(130) from interrupt
        facts = pool_facts(store, file.name)
    if as_json:
        print_json(facts.to_json())
    else:
        print_pool(facts)
