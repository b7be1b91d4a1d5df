"""`trappm mcp`: tools for assistants."""

from __future__ import annotations

import sys

import typer


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Serve")(mcp)


def mcp() -> None:
    """Serve tools to an assistant: predict, compare, advise and labels.

    Messages of the Model Context Protocol come by standard input and leave by standard output.

    Example: trappm mcp (in Claude Code: claude mcp add trappm -- trappm mcp)
    """
    from trappm.extensions.mcp.server import serve

    if sys.stdin.isatty():
        typer.echo("Waiting for messages of a client on standard input (Ctrl-D to stop)", err=True)
    serve()
