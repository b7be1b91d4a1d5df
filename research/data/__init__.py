"""Published sheets that research reads: their folder, manifest and verification."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from trappm.profiler.errors import InputError

ROOT = Path(__file__).parents[2]
MANIFEST = Path(__file__).with_name("manifest.yaml")


def data_folder() -> Path:
    """Return the folder of published sheets: TRAPPM_DATA, otherwise ../shared/data.

    Raises:
        InputError: The folder does not exist.
    """
    folder = Path(os.environ.get("TRAPPM_DATA") or ROOT.parent / "shared" / "data")
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder. Set TRAPPM_DATA to the published sheets")
    return folder


def sheets() -> Mapping[str, Mapping[str, Any]]:
    """Return the manifest's entries by file name."""
    entries: Mapping[str, Mapping[str, Any]] = yaml.safe_load(MANIFEST.read_text())
    return entries


SHOWN_LICENCES = frozenset(
    ("Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC-BY-4.0", "CC0-1.0", "MIT")
)
"""Licences that allow to show rows with their source."""


def may_be_shown(licence: str) -> bool:
    """Return whether rows under a licence may be shown; one with exceptions by folder may not."""
    return licence in SHOWN_LICENCES


def verified(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield each sheet with its state: `ok`, `missing` or `changed`."""
    for name, entry in sheets().items():
        path = folder / name
        if not path.is_file():
            yield name, "missing"
            continue
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        yield name, "ok" if digest == entry["sha256"] else "changed"
