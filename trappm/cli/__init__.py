"""The command line.

Errors become one line on standard error: exit status 2 for what the user can fix in the command, 1
for what failed while it ran. `--debug`, anywhere in the command, shows the traceback.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
import traceback
from typing import Annotated

import typer

from trappm import __version__
from trappm.cli import (
    campaign,
    devices,
    labels,
    measure,
    pool,
    predict,
    snapshot,
    store,
)
from trappm.profiler.errors import InputError, TrappmError
from trappm.profiler.extensions import extension_modules

app = typer.Typer(
    name="trappm",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: trappm predict resnet18 --batch-size 4 --input-size 96",
)
PREDICT, MEASURE, DATA = "Predict", "Measure", "Labels and snapshots"
app.command(name="predict", rich_help_panel=PREDICT)(predict.predict)
app.command(name="compare", rich_help_panel=PREDICT)(predict.compare)
app.command(name="devices", rich_help_panel=PREDICT)(devices.devices)
app.command(name="measure", rich_help_panel=MEASURE)(measure.measure)
app.add_typer(campaign.app, name="campaign", rich_help_panel=MEASURE)
app.add_typer(pool.app, name="pool", rich_help_panel=MEASURE)
app.add_typer(labels.app, name="labels", rich_help_panel=DATA)
app.add_typer(snapshot.app, name="snapshot", rich_help_panel=DATA)
app.add_typer(store.app, name="store", rich_help_panel=DATA)
for _extension in extension_modules("commands"):
    _extension.register(app)

EXTRAS = {
    "campaign": (
        "pandas", "pyarrow", "ray", "sqlalchemy", "tenacity", "torch_geometric",
    ),
    "evaluate": ("matplotlib", "optuna", "sklearn"),
    "postgresql": ("psycopg",),
    "serve": (
        "fastapi", "multipart", "prometheus_client", "python_multipart", "starlette", "uvicorn",
    ),
    "integrations": ("lightning",),
    "mcp": ("mcp", "mcp_types"),
    "transformers": ("accelerate", "peft", "transformers"),
}  # fmt: skip
"""Top-level modules by the extra of pyproject.toml that brings them."""

COLLECTION_THRESHOLD = 100_000
"""Number of new objects before garbage is collected: imports make many, and none is garbage."""

_UNWRITABLE = {errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG}
"""Errors of standard output, such as a full disk."""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trappm {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
    _debug: Annotated[bool, typer.Option("--debug", help="Show the trace of an error.")] = False,
) -> None:
    """Predict time, memory and power of deep-learning training steps.

    Labels, snapshots and caches are in the folder TRAPPM_HOME (default: ~/.local/share/trappm).
    """


def main() -> None:
    """Entry point of the `trappm` command."""
    gc.set_threshold(COLLECTION_THRESHOLD)
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    status = run(arguments, debug=len(arguments) < len(sys.argv) - 1)
    gc.freeze()  # the collection at Python's end takes a fifth of the time of torch's import
    sys.exit(status)


def run(
    arguments: list[str], *, debug: bool = False, app: typer.Typer = app, name: str = "trappm"
) -> int:
    """Run one command of an application and return its exit status."""
    try:
        if sys.stdout is None:  # by `>&-` of a shell
            raise InputError("standard output is closed; redirect it, for example to /dev/null")
        status = app(args=arguments, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except typer.TyperException as error:
        message = error.format_message().replace("Value error, ", "").rstrip()  # of pydantic
        if not message or "\n" in message:  # no command was given: the message is the help text
            typer.echo(message, err=True, nl=bool(message))
            return 2
        context = getattr(error, "ctx", None)
        hint = f" (see: {context.command_path} --help)" if context else ""
        return _fail(f"{message}{hint}", 2, error, debug)
    except TrappmError as error:
        return _fail(str(error), error.exit_status, error, debug)
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("trappm: interrupted", err=True)
        return 130
    except BrokenPipeError:  # `trappm labels query | head` is not an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in _UNWRITABLE or error.filename is not None:
            return _fail(f"unexpected {type(error).__name__}: {error}", 1, error, debug)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's end fails, too
        return _fail(f"the output cannot be written: {error.strerror}", 1, error, debug)
    except ModuleNotFoundError as error:
        command = next((name for name in arguments if not name.startswith("-")), "")
        message = _advice(error, command) or f"unexpected {type(error).__name__}: {error}"
        return _fail(message, 2, error, debug)
    except Exception as error:  # the last resort: still one line, and the way to the rest
        message = f"unexpected {type(error).__name__}: {error}; --debug shows the trace"
        return _fail(message, 1, error, debug)
    return status if isinstance(status, int) else 0


def _advice(error: ModuleNotFoundError, command: str) -> str | None:
    """Return which extra brings a missing module to a command; None for other modules."""
    module = (error.name or "").partition(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if module in modules), None)
    if extra is None:
        return None
    if extra == "campaign" and command == "serve":  # its extra includes that one
        extra = "serve"
    return f"this needs {module}, which is not installed: pip install 'trappm[{extra}]'"


def _fail(message: str, status: int, error: Exception, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    typer.echo("trappm: error: " + " ".join(message.split()), err=True)
    return status
