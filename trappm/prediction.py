"""`trappm.predict`: the cost of a step of a model, from a published snapshot.

The answer unpacks as step time, memory, power, in the order of the paper's Figure 8.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler.errors import InputError, SnapshotError
from profiler.records import METRICS

if TYPE_CHECKING:
    from profiler.records import GraphTemplate
    from store import Home, Store

MANIFEST = "manifest.json"

MAX_SIZE = 1_000_000
"""Batch and input sizes beyond this are slips of the keyboard, and overflow what is computed."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What one training step costs; iterating gives step time, memory, power."""

    model: str
    device: str
    batch_size: int
    snapshot: str
    step_time_ms: float | None
    memory_mib: float | None
    power_w: float | None
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """For each metric, the bounds of its 90 % spread over the ensemble of heads."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """For each metric that is None: why."""

    def __iter__(self) -> Iterator[float | None]:
        return iter((self.step_time_ms, self.memory_mib, self.power_w))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def predict(
    model: str | Path,
    *,
    batch_size: int | None = None,
    input_size: int | None = None,
    device: str | None = None,
    snapshot: str | Path = "latest",
) -> Prediction:
    """Predicts the cost of a training step of a timm architecture or an ONNX file.

    Args:
        model: a timm name, or the path of an ONNX file.
        batch_size: samples a step; by default the file's own, or 1.
        input_size: pixels, for timm names; by default the architecture's own.
        device: a device that the snapshot has heads for; by default its source device.
        snapshot: an id, an alias, or a folder with a pulled snapshot.

    Raises:
        UnknownArchitectureError: no such timm architecture.
        ModelFileError: the file is not an ONNX model that we can read.
        SnapshotError: no such snapshot, or it has no head for the device.
        InputError: a batch or input size that the model cannot have.
    """
    is_file = isinstance(model, Path) or model.endswith(".onnx") or os.sep in model
    batch = 1 if batch_size is None else batch_size
    for name, value in (("batch size", batch_size), ("input size", input_size)):
        if value is not None and not 1 <= value <= MAX_SIZE:
            raise InputError(f"{name} is {value}; it must be from 1 to {MAX_SIZE:,}")
    template = _of_file(Path(model), input_size) if is_file else None
    if template is None:
        from profiler.zoo import check

        check(str(model))
    elif batch_size is None and template.fixed_batch_size is not None:
        batch = template.fixed_batch_size
    from learner.snapshot import load_snapshot

    loaded = load_snapshot(_locate(snapshot))
    key = device or loaded.source_device
    graph = (template or _of_architecture(str(model), input_size)).at(batch)
    predictions = loaded.predict([graph], key)
    values: dict[str, float | None] = dict.fromkeys(METRICS)
    intervals, missing = {}, {}
    for metric in METRICS:
        if metric in predictions.metrics:
            at = predictions.metrics.index(metric)
            values[metric] = float(predictions.mean[0, at])
            intervals[metric] = (float(predictions.low[0, at]), float(predictions.high[0, at]))
        else:
            missing[metric] = f"the snapshot has no {metric} head for {key}"
    return Prediction(
        model=str(model),
        device=key,
        batch_size=batch,
        snapshot=loaded.id,
        intervals=intervals,
        missing=missing,
        **values,
    )


def snapshot_folder(store: Store, home: Home, name: str) -> Path:
    """The folder of a published snapshot, by id or alias.

    Raises:
        SnapshotError: there is none of that name.
    """
    record = store.snapshot(name)
    if record is None:
        names = [*sorted(store.aliases()), *(s.id for s in store.snapshots())]
        known = "none is published yet; see: trappm campaign launch --help"
        if names:
            known = f"there are: {', '.join(names)}"
        raise SnapshotError(f"no snapshot {name!r}; {known}")
    return home.snapshots / record.location


def _locate(snapshot: str | Path) -> Path:
    if isinstance(snapshot, Path) or (Path(snapshot) / MANIFEST).is_file():
        return Path(snapshot)
    from store import Home, Store

    home = Home.open()
    with Store.open(home.database_url) as store:
        return snapshot_folder(store, home, snapshot)


def _of_file(path: Path, input_size: int | None) -> GraphTemplate:
    from profiler.onnx_reader import read_onnx

    return read_onnx(path, input_size=input_size)


def _of_architecture(architecture: str, input_size: int | None) -> GraphTemplate:
    from profiler.static import graph_template
    from profiler.zoo import native_input_size

    size = native_input_size(architecture) if input_size is None else input_size
    if size is None:
        raise InputError(f"timm names no input size for {architecture}; give one, such as 224")
    return graph_template(architecture, size)
