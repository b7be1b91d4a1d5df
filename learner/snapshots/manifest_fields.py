"""A snapshot's manifest as a validated record.

A checksum shows damage, not intent: anyone who can write into a registry can seal a manifest of any
content. Fields that are not named here are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    StringConstraints,
)

from trappm.profiler.records import METRICS, Phase

MAX_SNAPSHOT_BYTES = 256 << 20
"""Limit of all files together; the shipped snapshot has 10 MiB."""
MAX_FILES = 256
MAX_FAMILIES = 10_000


def _time(text: str) -> str:
    datetime.fromisoformat(text)
    return text


def _metric(text: str) -> str:
    if text not in METRICS:
        raise ValueError(f"no metric; those are {', '.join(METRICS)}")
    return text


_Metric = Annotated[str, AfterValidator(_metric)]


def _files(entries: dict[str, FileEntry]) -> dict[str, FileEntry]:
    if sum(entry.bytes for entry in entries.values()) > MAX_SNAPSHOT_BYTES:
        raise ValueError(f"more than {MAX_SNAPSHOT_BYTES >> 20} MiB together")
    return entries


_Short = Annotated[str, StringConstraints(max_length=1000)]
_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$")]
_Count = Annotated[int, Field(ge=0, le=2**53)]
_Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_Number = Annotated[int, Field(ge=-(2**53), le=2**53)] | float
_Numbers = dict[str, _Number | None]
_ShortTexts = dict[str, _Short]


class _Part(BaseModel):
    """Part of a manifest; more fields are allowed."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


class FileEntry(_Part):
    """Checksum and size of a file."""

    sha256: _Sha256
    bytes: _Count


class HeadEntry(_Part):
    """Heads of one device and phase; further fields are settings of their kind."""

    kind: _Short
    label_count: _Count
    label_settings: list[tuple[_Short, _Short, _Short]]
    metrics: list[_Metric]


class MetricErrors(_Part):
    """Errors of one head on architectures that it had not seen, in percent unless named."""

    __pydantic_extra__: _Numbers
    count: _Number | None = None
    mape: _Number | None = None
    by_family: dict[str, _Numbers] | None = None
    reliability: _Numbers | None = None
    """Coverage in percent, by the nominal coverage in percent."""

    def number(self, name: str) -> float | None:
        """Return a figure such as `coverage`; None if it is missing."""
        value: float | None = self.model_dump(exclude={"by_family", "reliability"}).get(name)
        return value


class PresetEntry(_Part):
    """Preset of encoder and heads, with its numbers."""

    name: _Short
    encoder: dict[str, bool | _Number | Annotated[list[int], Field(max_length=32)]]
    head: dict[str, bool | _Number | _Short | Annotated[list[int], Field(max_length=32)]]


class _Labels(_Part):
    counts: dict[str, dict[str, _Count]]
    sha256: _Sha256


class _Source(_Part):
    labels: _Count
    file: _Short
    source: _Short


class Manifest(_Part):
    """Contents of a snapshot, its errors, training labels and files."""

    id: _Short
    created_at: Annotated[str, AfterValidator(_time)]
    files: Annotated[
        dict[_Name, FileEntry], Field(min_length=1, max_length=MAX_FILES), AfterValidator(_files)
    ]
    heads: dict[_Name, dict[Phase, HeadEntry]]
    source_device: _Name
    preset: PresetEntry
    training_labels: _Labels
    units: _ShortTexts
    feature_schema: _ShortTexts
    versions: _ShortTexts
    errors: (
        dict[str, dict[Phase, dict[_Metric, MetricErrors]] | dict[_Metric, MetricErrors]] | None
    ) = None
    """By device and phase, or by device where phases were judged together."""
    sources: list[_Source] = []
    campaign: _Short | None = None
    parent: _Short | None = None
    split: _Short | None = None
    label_counts: dict[str, _Count] = {}
    cards: dict[_Name, _Short] = {}
    families: Annotated[list[_Short], Field(max_length=MAX_FAMILIES)] | None = None
    """Families of the models in a campaign's pool."""
    _json: dict[str, Any] = PrivateAttr(default_factory=dict)

    @classmethod
    def of(cls, values: dict[str, Any], data: bytes) -> Self:
        """Return the record of a manifest, given as JSON values and as their text.

        Raises:
            pydantic.ValidationError: A field is invalid.
        """
        manifest = cls.model_validate_json(data, strict=True)
        manifest._json = values
        return manifest

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as it was written, with unknown fields."""
        return self._json

    def errors_by_phase(self, device: str) -> Mapping[Phase | None, Mapping[str, MetricErrors]]:
        """Return the errors of a device by phase and metric; None is all phases together."""
        of_device: Mapping[Any, Any] = (self.errors or {}).get(device, {})
        return {None: of_device} if set(of_device) & set(METRICS) else of_device
