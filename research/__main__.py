"""`python -m research`: evaluate, tune, replay, snapshot, fit-priors, tables, data and import."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from research import data, scripts
from research.evaluation.command import evaluate
from research.importers.command import import_
from research.replay.command import replay
from research.tuning.command import tune
from trappm.cli import run

app = typer.Typer(
    name="research",
    help="Evaluate predictors, fit shipped constants and train the shipped snapshot.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(evaluate)
app.command()(tune)
app.command()(replay)
app.command(name="import")(import_)

_Name = Annotated[str | None, typer.Argument(help="Name of one script (default: all).")]
_List = Annotated[bool, typer.Option("--list", help="List the names and exit.")]
_Traces = Annotated[Path, typer.Option(help="Folder that keeps traced kernels.")]
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=_PASS_ON)
def snapshot(context: typer.Context) -> None:
    """Train the shipped snapshot. Options: --processes, --to, --add."""
    script = scripts.Script(
        "research.snapshot.default_snapshot", "trappm/shipped_snapshot", ("{data}",)
    )
    scripts.run(script, Path(), context.args)


@app.command(name="fit-priors")
def fit_priors(name: _Name = None, list_: _List = False, traces: _Traces = Path("traces")) -> None:
    """Fit the shipped constants to published labels and write them into the packages."""
    _run(scripts.PRIORS, name, list_, traces)


@app.command()
def tables(name: _Name = None, list_: _List = False, traces: _Traces = Path("traces")) -> None:
    """Print the tables and draw the figures of the documentation."""
    _run(scripts.TABLES, name, list_, traces)


@app.command(name="data")
def data_(
    check: Annotated[
        bool, typer.Option("--check", help="Verify the sheets against the manifest.")
    ] = False,
) -> None:
    """List the published sheets with their sources, or verify those in TRAPPM_DATA."""
    if not check:
        for name, entry in data.sheets().items():
            typer.echo(f"{name}\n  {entry['source']} ({entry['licence']})")
        return
    states = list(data.verified(data.data_folder()))
    for name, state in states:
        typer.echo(f"{state:8} {name}")
    if any(state != "ok" for _, state in states):
        raise typer.Exit(1)


def _run(known: Mapping[str, scripts.Script], name: str | None, list_: bool, traces: Path) -> None:
    if list_:
        for each, script in known.items():
            typer.echo(f"{each:16} {script.makes}")
        return
    for script in scripts.chosen(known, name):
        scripts.run(script, traces)


def main(arguments: list[str]) -> int:
    """Run one command and return its exit status."""
    debug = "--debug" in arguments
    return run([a for a in arguments if a != "--debug"], debug=debug, app=app, name="research")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
