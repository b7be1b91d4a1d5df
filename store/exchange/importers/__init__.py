"""Labels that others have published, each importer with the faults of its sheets in mind.

What they make is `imported`, under a device key of its own and under the software stack that the
source tells; a row of which nothing can be made is counted with its reason, never dropped silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from trappm.profiler.errors import InputError
from trappm.store.exchange.importers import gpumemnet, in_training, node_steps, timm_results, zeus
from trappm.store.files import ImportReport, Verdict, import_verdicts, read_file
from trappm.store.store import Store

SOURCES = ("gpumemnet", "timm", zeus.SOURCE, in_training.SOURCE, *node_steps.SOURCES)


def import_file(
    store: Store, path: Path, *, source: str | None = None, check_models: bool = False
) -> ImportReport:
    """Records what stands in a file, unless one of its rows cannot be read; then nothing.

    Args:
        store: where to.
        path: a file of `store.files.export_file`, JSON lines of the profiler, or a sheet
        of the
            source. Sheets of timm keep their names, which tell what was measured.
        source: of a published sheet, one of SOURCES.
        check_models: of GPUMemNet's sheet: traces each architecture, about a second for each, and
            does not trust rows that are not about the model that timm builds today.

    Raises:
        InputError: the file, one of its rows or the source cannot be; nothing was recorded.
        StoreError: the store cannot be written; importing again completes it.
    """
    if source is not None and source not in SOURCES:
        raise InputError(f"no source is named {source!r}; there are {', '.join(SOURCES)}")
    if check_models and source != "gpumemnet":
        raise InputError("models are checked for the source gpumemnet only")
    read: Callable[[], Iterable[Verdict]] = partial(read_file, path)
    if source == "timm":
        read = partial(iter, timm_results.verdicts(path))
    elif source == "gpumemnet":
        read = partial(iter, gpumemnet.verdicts(path, check_models=check_models))
    elif source == zeus.SOURCE:
        read = partial(iter, zeus.verdicts(path))
    elif source == in_training.SOURCE:
        read = partial(iter, in_training.verdicts(path))
    elif source is not None:
        read = partial(iter, node_steps.verdicts(path, source))
    return import_verdicts(store, read, path.name, source or "TraPPM")
