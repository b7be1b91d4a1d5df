"""The list that a sweep measures: configurations and groups of them, from YAML or JSON lines.

A file that ends in .yaml, .yml or .json has a list of entries, or the mapping `groups: [...]` of a
campaign file's pool; any other file has one entry a line, in JSON. An entry is a configuration
(`architecture`, `batch_size`, `input_size`, ...) or a group (`architectures`, `batch_sizes`,
`input_sizes`, ..., see `profiler.models.pool`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trappm.profiler.errors import InputError, one_line
from trappm.profiler.files.plain_files import read_plain
from trappm.profiler.models.pool import PoolGroup, PoolSpec, build_pool
from trappm.profiler.records import Configuration

_MAX_BYTES = 64 << 20
_DOCUMENTS = {".yaml", ".yml", ".json"}


def read_configurations(path: Path) -> list[Configuration]:
    """The configurations of a list, each once, in its order; a group's are sorted.

    Raises:
        InputError: the file cannot be read or is empty, or an entry of it is wrong (told by its
            number).
    """
    configurations: dict[Configuration, None] = {}
    entries = _document(path) if path.suffix.lower() in _DOCUMENTS else _lines(path)
    for where, entry in entries:
        try:
            configurations.update(dict.fromkeys(_configurations(entry)))
        except InputError as error:
            raise InputError(f"{where} of {path}: {error}") from error
    if not configurations:
        raise InputError(f"{path} lists no configurations")
    return list(configurations)


def _configurations(entry: object) -> list[Configuration]:
    if not isinstance(entry, dict) or not all(isinstance(key, str) for key in entry):
        raise InputError(f"{str(entry)[:80]!r} is no configuration and no group of them")
    if "architecture" not in entry:
        values = {name: _values(name, value) for name, value in entry.items()}
        return build_pool(PoolSpec(groups=(PoolGroup(**_fields(PoolGroup, values)),)))
    if not isinstance(entry["architecture"], str):
        raise InputError(f"architecture is {entry['architecture']!r}; it must be a name")
    return [Configuration(**_fields(Configuration, entry))]


def _fields(kind: type[Configuration | PoolGroup], entry: dict[str, Any]) -> dict[str, Any]:
    """The entry, which has what this kind needs and nothing that it does not know."""
    known = {field.name: field.default for field in dataclasses.fields(kind)}
    unknown = [name for name in entry if name not in known]
    if unknown:
        raise InputError(f"{unknown[0]!r} is none of {', '.join(known)}")
    for name, default in known.items():
        if default is dataclasses.MISSING and name not in entry:
            raise InputError(f"{name} is missing")
    return entry


def _values(name: str, values: object) -> tuple[Any, ...]:
    kinds = (str,) if name in {"architectures", "families"} else (str, int)
    if not isinstance(values, list) or not all(isinstance(value, kinds) for value in values):
        raise InputError(f"{name} is {str(values)[:80]!r}; a group has lists of names or numbers")
    return tuple(values)


def _document(path: Path) -> Iterator[tuple[str, object]]:
    from trappm.profiler.files.yaml_text import (
        load_yaml,  # timm needs PyYAML, so wherever we measure
    )

    document = load_yaml(_text(path), str(path))
    if isinstance(document, dict) and [*document] == ["groups"]:
        document = document["groups"]
    if not isinstance(document, list):
        raise InputError(f"{path} has no list of configurations, nor `groups` with a list")
    for number, entry in enumerate(document, 1):
        yield f"entry {number}", entry


def _lines(path: Path) -> Iterator[tuple[str, object]]:
    for number, line in enumerate(_text(path).splitlines(), 1):
        if line.strip():
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(
                    f"line {number} of {path} is no JSON: {one_line(error)}"
                ) from error
            yield f"line {number}", entry


def _text(path: Path) -> str:
    try:
        return read_plain(path, _MAX_BYTES).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read the list {path}: it is not UTF-8") from error
