"""Importers of published sheets, each handling the known faults of its source.

Rows become `imported` measurements under a device key and a software stack of their own. A row
that yields no measurement is counted with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from research.importers import gpumemnet, node_steps, timm_results, zeus
from trappm.profiler.errors import InputError
from trappm.store.files import ImportReport, Verdict, record_verdicts
from trappm.store.store import Store

SOURCES = ("gpumemnet", "timm", zeus.SOURCE, *node_steps.SOURCES)


def import_sheet(
    store: Store, path: Path, source: str, *, check_models: bool = False
) -> ImportReport:
    """Import a published sheet into the label store.

    Args:
        store: Label store that receives the measurements.
        path: Sheet; timm's sheets keep their file names, which tell what was measured.
        source: Name of the publication, one of SOURCES.
        check_models: Trace every architecture of GPUMemNet's sheet (about 1 s each) and reject
            rows that are not about the model that timm builds today.

    Raises:
        InputError: The source is unknown or a row cannot be read; nothing was recorded.
        StoreError: The store cannot be written; importing again completes it.
    """
    if source not in SOURCES:
        raise InputError(f"Unknown source {source!r}. Expected one of: {', '.join(SOURCES)}")
    if check_models and source != "gpumemnet":
        raise InputError("--check-models is available for the source gpumemnet only")
    read: Callable[[], Iterable[Verdict]]
    if source == "timm":
        read = lambda: timm_results.verdicts(path)  # noqa: E731
    elif source == "gpumemnet":
        read = lambda: gpumemnet.verdicts(path, check_models=check_models)  # noqa: E731
    elif source == zeus.SOURCE:
        read = lambda: zeus.verdicts(path)  # noqa: E731
    else:
        read = lambda: node_steps.verdicts(path, source)  # noqa: E731
    verdicts = list(read())
    return record_verdicts(store.measurements, path.name, source, lambda: verdicts)
