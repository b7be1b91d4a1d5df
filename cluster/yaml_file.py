"""Strict reading of the YAML files that users write, with errors of one line.

Every file is a mapping that a pydantic model describes; the error for an unknown key
suggests the nearest known one.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from trappm.profiler.errors import InputError
from trappm.profiler.files.plain_files import read_plain
from trappm.profiler.files.yaml_text import load_yaml

MAX_FILE_BYTES = 1 << 20
_UNKNOWN_KEY = frozenset(["extra_forbidden", "unexpected_keyword_argument"])
_MISSING_KEY = frozenset(["missing", "missing_argument", "missing_keyword_only_argument"])

Model = TypeVar("Model", bound=BaseModel)


def read_text(path: Path, *, kind: str) -> str:
    """The text of a file of a kind such as "campaign".

    Raises:
        InputError: it cannot be read, or is too large to be such a file.
    """
    try:
        return read_plain(path, MAX_FILE_BYTES).decode("utf-8")
    except InputError as error:
        raise InputError(f"the {kind} file: {error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read the {kind} file {path}: {error}") from error


def parse(
    text: str, model: type[Model], *, origin: str, kind: str, parts: Sequence[type[Any]]
) -> Model:
    """The record that a YAML text describes.

    Args:
        text: the file.
        model: what the file must be.
        origin: names the file in errors.
        kind: says what it should be, such as "campaign".
        parts: the models and dataclasses in the file, whose fields are the keys that it may have.

    Raises:
        InputError: not YAML, or not what the model says; names the first fault and its key.
    """
    data = load_yaml(text, origin)
    if not isinstance(data, dict):
        raise InputError(f"{origin} is not a {kind} file: it must be a mapping of keys to values")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise InputError(f"{origin}: {_first_fault(error, kind, parts)}") from error
    except InputError as error:
        raise InputError(f"{origin}: {error}") from error


def _first_fault(error: ValidationError, kind: str, parts: Sequence[type[Any]]) -> str:
    faults: list[Any] = list(error.errors())
    # A misspelt key explains the one that is missing; of a union, the branch that came furthest.
    fault = max(faults, key=lambda f: (f["type"] in _UNKNOWN_KEY, len(f["loc"])))
    # Of a union, pydantic names the branch too, which is no key of the file.
    branches = {"str", *(part.__name__ for part in parts)}
    where = ".".join(str(part) for part in fault["loc"] if part not in branches) or kind
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] in _UNKNOWN_KEY:
        known = [key for part in parts for key in _keys(part)]
        near = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1)
        message = "unknown key" + (f"; did you mean {near[0]!r}?" if near else "")
        if near:  # the key that is missing is this one
            explained = (*fault["loc"][:-1], near[0])
            faults = [f for f in faults if f["type"] not in _MISSING_KEY or f["loc"] != explained]
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return f"{where}: {message}{more}"


def _keys(part: type[Any]) -> list[str]:
    if issubclass(part, BaseModel):
        return list(part.model_fields)
    return [field.name for field in dataclasses.fields(part)]
