"""The fields of a snapshot's manifest and their types, so that whoever reads one can rely on it.

A checksum shows damage, not intent: whoever may write into a registry can seal a manifest of any
content. Fields that are not named here may be anything; nobody reads them.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
)

from trappm.profiler.records import METRICS, Phase

MAX_SNAPSHOT_BYTES = 256 << 20
"""Of all files together; the one that ships with trappm has 8 MiB."""
MAX_FILES = 256


def fault_of(data: bytes) -> str | None:
    """What of a manifest is not as it must be, with the field's name; None if all is."""
    try:
        _Manifest.model_validate_json(data, strict=True)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part)[:60] for part in fault["loc"])
        return f"{where}: {fault['msg']}" if where else fault["msg"]
    return None


def _time(text: str) -> str:
    datetime.fromisoformat(text)
    return text


def _metric(text: str) -> str:
    if text not in METRICS:
        raise ValueError(f"no metric; those are {', '.join(METRICS)}")
    return text


_Metric = Annotated[str, AfterValidator(_metric)]


def _files(entries: dict[str, _File]) -> dict[str, _File]:
    if sum(entry.bytes for entry in entries.values()) > MAX_SNAPSHOT_BYTES:
        raise ValueError(f"more than {MAX_SNAPSHOT_BYTES >> 20} MiB together")
    return entries


_Short = Annotated[str, StringConstraints(max_length=1000)]
_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$")]
_Count = Annotated[int, Field(ge=0, le=2**53)]
_Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_Numbers = dict[str, float | None]
_Words = dict[str, _Short]


class _Part(BaseModel):
    """Of a manifest; more fields may be there."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


class _File(_Part):
    sha256: _Sha256
    bytes: _Count


class _Head(_Part):
    kind: _Short
    label_count: _Count
    label_settings: list[tuple[_Short, _Short, _Short]]
    metrics: list[_Metric]


class _Errors(_Part):
    """Of one metric."""

    __pydantic_extra__: _Numbers
    by_family: dict[str, _Numbers] | None = None


class _Preset(_Part):
    name: _Short
    encoder: dict[str, bool | float | Annotated[list[int], Field(max_length=32)]]
    head: dict[str, bool | float | Annotated[list[int], Field(max_length=32)]]


class _Labels(_Part):
    counts: dict[str, dict[str, _Count]]
    sha256: _Sha256


class _Source(_Part):
    labels: _Count
    file: _Short
    source: _Short


class _Manifest(_Part):
    created_at: Annotated[str, AfterValidator(_time)]
    files: Annotated[
        dict[_Name, _File], Field(min_length=1, max_length=MAX_FILES), AfterValidator(_files)
    ]
    heads: dict[_Name, dict[Phase, _Head]]
    source_device: _Name
    preset: _Preset
    training_labels: _Labels
    units: _Words
    feature_schema: _Words
    versions: _Words
    errors: dict[str, dict[Phase, dict[_Metric, _Errors]] | dict[_Metric, _Errors]] | None = None
    """By device and phase, or by device where phases were judged together."""
    sources: list[_Source] = []
    campaign: _Short | None = None
    parent: _Short | None = None
    split: _Short | None = None
    label_counts: dict[str, _Count] = {}
    cards: dict[_Name, _Short] = {}
