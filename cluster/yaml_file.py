"""Strict reading of the YAML files that users write, with one line per fault.

Every file is a mapping that a pydantic model describes; the error for an unknown key
suggests the nearest known one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from trappm.profiler.errors import InputError, fault_text
from trappm.profiler.files import load_yaml, read_plain

MAX_FILE_BYTES = 1 << 20

BRANCH = "<"
"""Begins the tags of a union's branches, which are no keys of a file."""

_UNKNOWN_KEY = frozenset(["extra_forbidden", "unexpected_keyword_argument"])
_MISSING_KEY = frozenset(["missing", "missing_argument", "missing_keyword_only_argument"])

Model = TypeVar("Model", bound=BaseModel)


class FileFaultsError(InputError):
    """A file with faults: one line per fault, which begins with its key, the main one first."""

    def __init__(self, origin: str, faults: Sequence[str]) -> None:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        super().__init__(f"{origin}: {faults[0]}{more}")
        self.faults = tuple(faults)


def load(path: Path, model: type[Model], *, kind: str) -> Model:
    """Return the record that a YAML file describes.

    Raises:
        InputError: The file cannot be read, is too large, or is not what the model says.
    """
    try:
        text = read_plain(path, MAX_FILE_BYTES).decode("utf-8")
    except InputError as error:
        raise InputError(f"the {kind} file: {error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read the {kind} file {path}: {error}") from error
    return parse(text, model, origin=str(path), kind=kind)


def parse(text: str, model: type[Model], *, origin: str, kind: str) -> Model:
    """Return the record that a YAML text describes; errors name its origin and its kind.

    Raises:
        InputError: Not YAML, or not a mapping.
        FileFaultsError: Not what the model says.
    """
    data = load_yaml(text, origin)
    if not isinstance(data, dict):
        raise InputError(f"{origin} is not a {kind} file: it must be a mapping of keys to values")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise FileFaultsError(origin, _faults(error, model, kind)) from error
    except InputError as error:
        raise FileFaultsError(origin, [str(error)]) from error


def _faults(error: ValidationError, model: type[BaseModel], kind: str) -> list[str]:
    """Return one line per fault, unknown keys first."""
    faults = sorted(error.errors(), key=lambda fault: fault["type"] not in _UNKNOWN_KEY)
    known = set(_keys(model.model_json_schema()))
    misspelt: set[tuple[Any, ...]] = set()
    lines = []
    for fault in faults:
        location = tuple(part for part in fault["loc"] if not str(part).startswith(BRANCH))
        message = fault_text(fault)
        if fault["type"] in _UNKNOWN_KEY:
            name = str(location[-1])
            near = difflib.get_close_matches(name, sorted(known - {name}), n=1)
            message = "unknown key" + (f"; did you mean {near[0]!r}?" if near else "")
            misspelt |= {(*location[:-1], key) for key in near}
        elif fault["type"] in _MISSING_KEY and location in misspelt:
            continue  # the misspelt key explains it
        lines.append(f"{'.'.join(map(str, location)) or kind}: {message}")
    return lines


def _keys(schema: Any) -> Iterator[str]:
    """Yield the names of all properties in a JSON schema."""
    if isinstance(schema, dict):
        yield from schema.get("properties", {})
        schema = schema.values()
    elif not isinstance(schema, list):
        return
    for part in schema:
        yield from _keys(part)
