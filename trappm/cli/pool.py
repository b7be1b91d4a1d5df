"""`trappm pool`: build pools of configurations and their static profiles."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trappm.cli.options import AsJson, Processes, RetryRefused, print_json

if TYPE_CHECKING:
    from rich.console import Console

    from trappm.profiler.records import Pair
    from trappm.store import Store

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

    from trappm.cluster.pool_file import load_pool_file, store_pool

    file = load_pool_file(spec)
    from trappm.reports.pools import pool_facts, print_pool
    from trappm.store import Home, Store

    with Store.open(Home.open().database_url) as store:
        make_profiles(
            store,
            store_pool(store, file),
            address=address,
            processes=processes,
            retry_refused=retry_refused,
            to=Console(stderr=True, highlight=False) if as_json else None,
        )
        facts = pool_facts(store, file.name)
    if as_json:
        print_json(asdict(facts))
    else:
        print_pool(facts)


def make_profiles(
    store: Store,
    pairs: Sequence[Pair],
    *,
    address: str | None = None,
    processes: int | None,
    retry_refused: bool = False,
    to: Console | None = None,
) -> None:
    """Make static profiles and show the progress; an interruption ends the command.

    Args:
        store: Label store that receives the profiles.
        pairs: Architectures with their input sizes.
        address: Ray cluster; None for processes on this machine.
        processes: Number of processes (default: one per core).
        retry_refused: Whether pairs that were refused are tried again.
        to: Console of the progress (default: standard output).
    """
    from trappm.cluster import pool_file
    from trappm.terminal.progress_bars import BuildDisplay

    display = BuildDisplay(to)
    try:
        with display:
            pool_file.make_profiles(
                store,
                pairs,
                address=address,
                processes=processes or len(os.sched_getaffinity(0)),
                retry_refused=retry_refused,
                watch=display.show,
            )
    except KeyboardInterrupt as interrupt:
        typer.echo(f"trappm: interrupted{display.how_far}; the same command continues", err=True)
        raise typer.Exit(130) from interrupt
