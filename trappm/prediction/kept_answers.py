"""Answers that were given before, kept so that the same question is answered without torch.

An answer is named by all that it depends on: the question, the content of a file, this code and the
libraries that trace, every file of the snapshots that could answer, the prices, and what else this
kind of answer rests on, such as the label store. As with kept profiles, a damaged one is made
again, a folder that cannot be written keeps none, and deleting it loses nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from trappm.learner.snapshots.manifest import MANIFEST
from trappm.prediction.costs import FILE as PRICES
from trappm.prediction.models.profile_cache import tracing_versions
from trappm.profiler.files.whole_file import made_whole
from trappm.profiler.host.data_folder import data_folder

T = TypeVar("T")

MOST = 1000
"""So many are kept, the latest."""
MAX_BYTES = 16 << 20
_CODE = Path(__file__).parents[1]
"""With the shipped snapshot."""


def kept_answers(
    question: Mapping[str, Any],
    make: Callable[[], list[T]],
    *,
    write: Callable[[T], Mapping[str, Any]],
    read: Callable[[Mapping[str, Any]], T],
    rests_on: Callable[[], Sequence[Path]] = tuple,
) -> list[T]:
    """The answers to a question, made if they are not there.

    Args:
        question: all of it, in values that tell themselves apart by `repr`.
        make: answers it; what it raises is kept nowhere.
        write: an answer as values of JSON.
        read: the inverse; what it raises of values that are none (KeyError, TypeError, ValueError,
            AttributeError) has the answer made again.
        rests_on: further files that an answer depends on, as they are now.
    """
    folder = data_folder() / "answers"
    try:
        name = _name(question, rests_on())
    except OSError:  # something that it depends on is being moved, or cannot be read
        return make()
    path = folder / f"{name}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        if path.stat().st_size <= MAX_BYTES:
            return [read(row) for row in json.loads(path.read_bytes())]
    answers = make()
    with contextlib.suppress(OSError, TypeError, ValueError):  # the answer does not depend on it
        if _name(question, rests_on()) != name:  # a snapshot was published meanwhile
            return answers
        data = json.dumps([write(answer) for answer in answers]).encode()
        folder.mkdir(parents=True, exist_ok=True)
        with made_whole(path, replace=True) as part:
            part.write_bytes(data)
        kept = sorted(folder.glob("*.json"), key=lambda entry: entry.stat().st_mtime_ns)
        for entry in kept[:-MOST]:
            entry.unlink(missing_ok=True)
    return answers


def _name(question: Mapping[str, Any], rests_on: Sequence[Path]) -> str:
    named = question.get("snapshot")
    places = [data_folder() / "snapshots", data_folder() / PRICES, *rests_on]
    if named is not None and (Path(named) / MANIFEST).is_file():
        places.append(Path(named))
    state = (_code(), tracing_versions(), [list(_files(place)) for place in places])
    identity = repr((state, sorted((name, repr(value)) for name, value in question.items())))
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


@cache
def _code() -> Sequence[tuple[str, int, int]]:
    return tuple(_files(_CODE))


def _files(place: Path) -> Iterator[tuple[str, int, int]]:
    """Name, size and time of change of each file in a folder and below, or of the file itself."""
    if place.is_file():
        status = place.stat()
        yield str(place), status.st_size, status.st_mtime_ns
    for folder, folders, names in os.walk(place, followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(names):
            status = os.stat(os.path.join(folder, name))
            yield os.path.join(folder, name), status.st_size, status.st_mtime_ns
