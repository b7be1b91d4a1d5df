"""Write the board: one static page, measured against predicted for the rows that may be shown.

Missing traces are made and stored in TRAPPM_HOME, so a second run is faster. By default each label
sheet has a part of its labels; the page says how many.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from research.board.page import page
from research.board.rows import BoardSheet, LeftOut, gathered, parts
from research.evaluation.workbench import CORES, Processes
from trappm import __version__
from trappm.learner.snapshots.manifest import read_manifest
from trappm.prediction.selection import SHIPPED
from trappm.profiler.errors import InputError, nearest
from trappm.profiler.files import write_atomically
from trappm.profiler.host.environment import utc_now

MOST = 120
"""Labels of each label sheet by default."""


def main(
    to: Annotated[Path, typer.Option(help="HTML file to replace.")] = Path("board.html"),
    most: Annotated[int, typer.Option(min=0, help="Labels of each label sheet (0: all).")] = MOST,
    only: Annotated[
        list[str] | None, typer.Option(help="Sheet to show; may be repeated (default: all).")
    ] = None,
    processes: Processes = CORES,
) -> None:
    """Write the board."""
    if not to.parent.is_dir():
        raise InputError(f"there is no folder {to.parent}; make it, or name another file by --to")
    known = parts(most or None, processes)
    for name in only or ():
        if name not in known:
            raise InputError(f"Unknown sheet {name!r}; {nearest(name, list(known))}")
    made = list(gathered({name: known[name] for name in only or known}))
    text = page(
        [sheet for sheet in made if isinstance(sheet, BoardSheet) and sheet.rows],
        [sheet for sheet in made if isinstance(sheet, LeftOut)],
        f"TraPPM {__version__}, snapshot {read_manifest(SHIPPED).id}, {utc_now()[:10]}.",
    )
    with write_atomically(to, replace=True) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
    print(f"{to}: {len(text.encode()) / 2**20:.2f} MiB")
