"""`python -m research`: evaluate, tune, replay, costbench, board, fit-priors, tables and more."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from research import data
from research.evaluation.command import evaluate
from research.importers import import_
from research.replay.command import replay
from research.tuning import tune
from trappm.cli import run
from trappm.profiler.errors import InputError, nearest

WRITE, FIT = ("--write",), ("--fit",)


@dataclass(frozen=True)
class Script:
    """A module with a `main`, and the arguments that produce its result."""

    module: str
    makes: str
    """Shipped file or documentation page of the output."""
    arguments: tuple[str, ...] = ()


_PHYSICS = "learner/physics"
PRIORS: Mapping[str, Script] = {
    name: Script(f"research.priors.{module}", makes, arguments)
    for name, module, makes, arguments in (
        ("step-time", "second_device", f"{_PHYSICS}/devices/known_devices.safetensors", WRITE),
        ("other-devices", "other_devices", f"{_PHYSICS}/devices/other_devices.safetensors", WRITE),
        (
            "compiled",
            "compiled",
            f"{_PHYSICS}/compiled_step.safetensors",
            ("--most", "6", "--write"),
        ),
        ("power", "power", f"{_PHYSICS}/known_power.safetensors", WRITE),
        ("links", "collectives", "trappm/extensions/parallel/link_kinds.csv", WRITE),
        (
            "megatron",
            "megatron_steps",
            "prints LAUNCH_US of extensions/parallel/model_parallel",
            FIT,
        ),
        ("scatter", "ddp_steps", "prints constants of extensions/parallel/schedules.py", ()),
        ("transformers", "language_models", "prints extensions/transformers/model_heads.py", FIT),
        ("decoding", "decoding", "prints extensions/transformers/generation.py", FIT),
        ("workspace", "memory_simulation", "prints WORKSPACE_SHARE of memory/simulation", FIT),
    )
}
"""Fits of shipped constants, in order of their dependencies."""

TABLES: Mapping[str, Script] = {
    name: Script(f"research.{module}", f"docs/{page}")
    for name, module, page in (
        ("accuracy", "tables.accuracy", "research/accuracy.md"),
        ("second-device", "priors.second_device", "research/step_time.md"),
        ("other-devices", "priors.other_devices", "research/step_time.md"),
        ("compiled-steps", "priors.compiled", "research/step_time.md"),
        ("compiled-training", "tables.compiled_training", "research/step_time.md"),
        ("memory", "priors.memory_simulation", "research/memory.md"),
        ("power", "priors.power", "research/accuracy.md"),
        ("links", "priors.collectives", "research/step_time.md"),
        ("ddp", "priors.ddp_steps", "research/step_time.md"),
        ("parallel", "priors.megatron_steps", "research/step_time.md"),
        ("language-models", "priors.language_models", "research/step_time.md"),
        ("decoding", "priors.decoding", "research/step_time.md"),
        ("figures", "tables.doc_figures", "figures"),
    )
}
"""Tables and figures of the documentation."""

SNAPSHOT = Script("research.snapshot.default_snapshot", "trappm/shipped_snapshot")
COSTBENCH = Script("research.costbench", "docs/compared_with.md")
BOARD = Script("research.board.command", "board.html")

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
_PASS_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
}
"""Settings of commands that pass the options after a name to its script."""


@app.command(context_settings={**_PASS_ON, "help_option_names": []})
def snapshot(context: typer.Context) -> None:
    """Train the shipped snapshot; for its options: snapshot --help."""
    execute(SNAPSHOT, context.args)


@app.command(context_settings={**_PASS_ON, "help_option_names": []})
def costbench(context: typer.Context) -> None:
    """Compare published predictors on the same rows of published sheets."""
    execute(COSTBENCH, context.args)


@app.command(context_settings={**_PASS_ON, "help_option_names": []})
def board(context: typer.Context) -> None:
    """Write one static page with measured against predicted; for its options: board --help."""
    execute(BOARD, context.args)


@app.command(name="fit-priors", context_settings=_PASS_ON)
def fit_priors(context: typer.Context, name: _Name = None, list_: _List = False) -> None:
    """Fit the shipped constants to published labels and write them into the packages.

    Options of a script follow its name: fit-priors power --traces FOLDER.
    """
    _execute_all(PRIORS, name, list_, context.args)


@app.command(context_settings=_PASS_ON)
def tables(
    context: typer.Context,
    name: _Name = None,
    list_: _List = False,
    check: Annotated[
        bool, typer.Option("--check", help="Compare docs/research/accuracy.md; exit 1 if worse.")
    ] = False,
) -> None:
    """Print the tables and draw the figures of the documentation.

    Options of a script follow its name: tables accuracy --processes 2.
    """
    if check:
        # An option behind --check, such as --processes, is parsed as the name.
        execute(TABLES["accuracy"], ["--check", *([name] if name else []), *context.args])
        return
    _execute_all(TABLES, name, list_, context.args)


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


def _execute_all(
    known: Mapping[str, Script], name: str | None, list_: bool, options: Sequence[str]
) -> None:
    if list_:
        for each, script in known.items():
            typer.echo(f"{each:16} {script.makes}")
        return
    if name is not None and name not in known:
        raise InputError(f"Unknown name {name!r}; {nearest(name, list(known))}")
    for each in known if name is None else [name]:
        execute(known[each], options)


def execute(script: Script, options: Sequence[str] = ()) -> None:
    """Call the `main` of a script with its arguments and further options."""
    module = importlib.import_module(script.module)
    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command.command(help=module.__doc__)(module.main)
    status = command([*script.arguments, *options], prog_name=script.module, standalone_mode=False)
    if status:
        raise typer.Exit(status)


def main(arguments: list[str]) -> int:
    """Run one command and return its exit status."""
    debug = "--debug" in arguments
    return run([a for a in arguments if a != "--debug"], debug=debug, app=app, name="research")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
