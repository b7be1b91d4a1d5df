"""`trappm pool`: build pools of configurations and trace their steps."""

from __future__ import annotations

import os
from dataclasses import asdict
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
    """Make all configurations of a pool file, and trace their steps.

    Stopped or killed, the same command continues where it stopped: no step is traced twice.
    """
    from rich.console import Console

    from trappm.cluster.pool_file import load_pool_file, make_traces, store_pool

    file = load_pool_file(spec)
    from trappm.reports.pools import pool_facts, print_pool
    from trappm.store import Home, Store
    from trappm.terminal.progress_bars import BuildDisplay

    display = BuildDisplay(Console(stderr=True, highlight=False) if as_json else None)
    processes = processes or len(os.sched_getaffinity(0))
    with Store.open(Home.open().database_url) as store:
        keys = store_pool(store, file)
        missing = store.traces.missing(keys)
        if retry_refused:
            missing += [key for key, state in store.traces.states(keys).items() if state.refusal]
        there = len(keys) - len(missing)
        try:
            with display:
                display.show(there, len(keys), None)
                traces = make_traces(store.traces, missing, address=address, processes=processes)
                for done, traced in enumerate(traces, there + 1):
                    display.show(done, len(keys), traced)
        except KeyboardInterrupt as interrupt:
            how_far = display.how_far
            typer.echo(f"trappm: interrupted{how_far}; the same command continues", err=True)
            raise typer.Exit(130) from interrupt
        facts = pool_facts(store, file.name)
    if as_json:
        print_json(asdict(facts))
    else:
        print_pool(facts)
