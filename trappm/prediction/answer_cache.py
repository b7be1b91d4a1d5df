"""Cache of predictions, so that a repeated question is answered without torch.

An entry is named by all that its predictions depend on: the question, the models' contents, this
code, the libraries that trace, the snapshots and the prices. A damaged entry is made again, a
folder that cannot be written caches nothing, and deleting it loses nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from trappm.learner.snapshots.manifest import MANIFEST
from trappm.prediction.costs import FILE as PRICES
from trappm.prediction.prediction import Prediction
from trappm.profiler.extensions import extension_folders
from trappm.profiler.files import made_whole
from trappm.profiler.host.environment import data_folder, library_versions, uses_fused_attention

MAX_ENTRIES = 1000
MAX_BYTES = 16 << 20
_CODE = Path(__file__).parents[1]
"""Package folder, which includes the shipped snapshot and extensions."""


def cached_predictions(
    identity: object, snapshot: str | Path | None, make: Callable[[], list[Prediction]]
) -> list[Prediction]:
    """Return the predictions of a question, made unless they are cached.

    Args:
        identity: The question, whose `repr` differs from that of any other.
        snapshot: Snapshot that the question names.
        make: Makes the predictions.
    """
    folder = data_folder() / "answers"
    try:
        name = _name(identity, snapshot)
    except OSError:  # something that they depend on is being moved, or cannot be read
        return make()
    path = folder / f"{name}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        if path.stat().st_size <= MAX_BYTES:
            return [Prediction.from_dict(row) for row in json.loads(path.read_bytes())]
    predictions = make()
    with contextlib.suppress(OSError, TypeError, ValueError):
        if _name(identity, snapshot) != name:  # a snapshot was published at the same time
            return predictions
        folder.mkdir(parents=True, exist_ok=True)
        with made_whole(path, replace=True) as part:
            part.write_text(json.dumps([prediction.to_dict() for prediction in predictions]))
        entries = sorted(folder.glob("*.json"), key=lambda entry: entry.stat().st_mtime_ns)
        for entry in entries[:-MAX_ENTRIES]:
            entry.unlink(missing_ok=True)
    return predictions


def _name(identity: object, snapshot: str | Path | None) -> str:
    places = [data_folder() / "snapshots", data_folder() / PRICES]
    if snapshot is not None and (Path(snapshot) / MANIFEST).is_file():
        places.append(Path(snapshot))
    state = (
        _code(),
        library_versions(),
        uses_fused_attention(),
        [list(_files(place)) for place in places],
        identity,
    )
    return hashlib.sha256(repr(state).encode()).hexdigest()[:32]


@cache
def _code() -> list[tuple[str, int, int]]:
    others = [place for place in extension_folders() if not place.is_relative_to(_CODE)]
    return [row for place in (_CODE, *others) for row in _files(place)]


def _files(place: Path) -> Iterator[tuple[str, int, int]]:
    """Yield name, size and modification time of a file, or of each file below a folder."""
    if place.is_file():
        status = place.stat()
        yield str(place), status.st_size, status.st_mtime_ns
    for folder, folders, names in os.walk(place, followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(names):
            status = os.stat(os.path.join(folder, name))
            yield os.path.join(folder, name), status.st_size, status.st_mtime_ns
