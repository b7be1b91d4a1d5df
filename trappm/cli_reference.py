"""The reference page of the command line, generated from the command tree with all extensions."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import typer
from typer.core import TyperGroup

from trappm import cli

HEAD = """# Command line

These are all commands with their arguments and options. `trappm COMMAND --help` shows the same.
This page is generated with `python -m trappm.cli_reference`.
"""


def page() -> str:
    """Return the reference page in Markdown."""
    root = typer.main.get_command(cli.app)
    context = typer.Context(root, info_name="trappm")
    return "\n".join([HEAD, *(_section(each) for each in _commands(context))])


def _commands(context: typer.Context) -> Iterator[typer.Context]:
    """Yield the context of each visible command below a group, in the order of `--help`."""
    group = context.command
    if not isinstance(group, TyperGroup):
        raise TypeError(f"{context.command_path} is not a command group")
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        below = typer.Context(command, info_name=name, parent=context)
        if isinstance(command, TyperGroup):
            yield from _commands(below)
        else:
            yield below


def _section(context: typer.Context) -> str:
    """Return title, help and table of parameters of a command."""
    command = context.command
    text = " ".join((command.help or "").split("\n\n")[0].split())
    rows = []
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is None or "--help" in parameter.opts:
            continue
        name, meaning = (" ".join(part.split()).replace("|", "\\|") for part in record)
        rows.append(f"| `{name}` | {meaning} |")
    table = ["| parameter | meaning |", "|---|---|", *rows, ""] if rows else []
    return "\n".join([f"## `{context.command_path}`", "", text, "", *table])


if __name__ == "__main__":
    sys.stdout.write(page())
