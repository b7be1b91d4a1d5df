"""Runs of a benchmark kept in a folder, so that hours of training can be stopped and gone on with.

A run is named by all that it follows from (labels, estimator, split, seed), but not by the code: a
folder belongs to one state of it.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trappm.learner.estimator import Estimate
from trappm.learner.stats.calibration import LEVELS

COLUMNS: Mapping[str, tuple[int, ...]] = {
    "median": (),
    "low": (),
    "high": (),
    "log_quantiles": LEVELS.shape,
}
"""What is kept of an estimate, with the shape that each row has."""


class KeptRuns:
    """The predictions of every run that has been made."""

    def __init__(self, folder: Path, settings: Sequence[object]) -> None:
        """Keeps them in `folder`, which is made; `settings` are what all runs have in common."""
        self.folder = folder
        self.settings = tuple(settings)
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, run: Sequence[object], count: int) -> Estimate | None:
        """The predictions of `count` rows by this run; None if it has not been made."""
        try:
            with np.load(self._path(run), allow_pickle=False) as file:
                columns = {name: file[name] for name in COLUMNS if name in file.files}
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):
            return None
        if "median" not in columns or any(
            column.shape != (count, *COLUMNS[name]) or column.dtype != np.float64
            for name, column in columns.items()
        ):
            return None
        return Estimate(**columns)

    def put(self, run: Sequence[object], estimate: Estimate) -> None:
        columns: dict[str, npt.NDArray[np.float64]] = {
            name: value for name in COLUMNS if (value := getattr(estimate, name)) is not None
        }
        path = self._path(run)
        part = path.with_name(f".{path.stem}.{os.getpid()}.npz")
        np.savez(part, **columns)  # type: ignore[arg-type]
        part.replace(path)

    def _path(self, run: Sequence[object]) -> Path:
        identity = repr((*self.settings, *run)).encode()
        return self.folder / f"{hashlib.sha256(identity).hexdigest()[:32]}.npz"
