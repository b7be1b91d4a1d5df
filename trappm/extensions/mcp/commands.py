"""`trappm mcp`: tools for assistants."""

from __future__ import annotations

import sys

import typer


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Serve")(mcp)


def mcp() -> None:
    """Serve the tools predict, compare, advise and labels to an assistant, by the Model Context
    Protocol over standard input and output.

    Example: claude mcp add trappm -- trappm mcp
    """
    from trappm.extensions.mcp.server import serve

    if sys.stdin.isatty():
        typer.echo("Waiting for messages of a client on standard input (Ctrl-D to stop)", err=True)
    serve()
