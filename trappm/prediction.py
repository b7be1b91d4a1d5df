"""`trappm.predict`: the cost of a step of a model, from a published snapshot.

The answer unpacks as step time, memory, power, in the order of the paper's Figure 8.
"""

from __future__ import annotations

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
    from learner.snapshot import load_snapshot

    folder = _locate(snapshot)
    template, batch = _template(model, batch_size, input_size)
    graph = template.at(batch)
    loaded = load_snapshot(folder)
    key = device or loaded.source_device
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


def _template(
    model: str | Path, batch_size: int | None, input_size: int | None
) -> tuple[GraphTemplate, int]:
    if isinstance(model, Path) or str(model).endswith(".onnx") or Path(model).is_file():
        from profiler.onnx_reader import read_onnx

        template = read_onnx(Path(model))
        own = template.fixed_batch_size or 1
        return template, own if batch_size is None else batch_size
    from profiler.static import graph_template
    from profiler.zoo import native_input_size

    name = str(model)
    size = native_input_size(name) if input_size is None else input_size
    if size is None:
        raise InputError(f"timm names no input size for {name}; give one, such as 224")
    return graph_template(name, size), 1 if batch_size is None else batch_size
