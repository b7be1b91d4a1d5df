"""`trappm.predict`: the cost of a step of a model, from a published snapshot.

The answer unpacks as step time, memory, power, in the order of the paper's Figure 8.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler.errors import InputError, SnapshotError
from profiler.records import MAX_SIZE, METRICS

if TYPE_CHECKING:
    import torch
    from torch import nn

    from profiler.simulation.memory_simulation import SimulatedMemory
    from profiler.static import StaticProfile, StepSource
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
    """For each metric, the bounds of the interval that 90 % of new architectures lie in."""
    unfamiliar: tuple[str, ...] = ()
    """Metrics whose head has seen nothing like this model: outside of what it knows."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """For each metric that is None: why."""
    simulated_memory: SimulatedMemory
    """Of a training step in fp32 on contiguous tensors, with plain SGD and gradients freed between
    steps, on CUDA's allocator, in MiB, whatever the device; without CUDA's context and libraries.
    AMP and channels-last memory need other sizes, which are not simulated."""
    memory_source: StepSource
    """What the simulated memory rests on."""
    memory_remark: str | None
    """Why rules answered, or what the source could not see."""

    def __iter__(self) -> Iterator[float | None]:
        return iter((self.step_time_ms, self.memory_mib, self.power_w))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def predict(
    model: str | Path | nn.Module,
    *,
    example_input: torch.Tensor | None = None,
    batch_size: int | None = None,
    input_size: int | None = None,
    device: str | None = None,
    snapshot: str | Path = "latest",
) -> Prediction:
    """Predicts the cost of a training step of a timm architecture, an ONNX file or a module.

    Args:
        model: a timm name, the path of an ONNX file, or a module whose forward takes one tensor;
            a module stays as it is.
        example_input: for modules, a tensor as `forward` takes it, batch first; only its shape
            and type are read.
        batch_size: samples a step; by default the example's or the file's own, or 1.
        input_size: pixels, for timm names; by default the architecture's own.
        device: a device that the snapshot has heads for; by default its source device.
        snapshot: an id, an alias, or a folder with a pulled snapshot.

    Raises:
        UnknownArchitectureError: no such timm architecture.
        ModelFileError: the file is not an ONNX model that we can read.
        SnapshotError: no such snapshot, or it has no head for the device.
        InputError: a batch or input size that the model cannot have, or an example that does not
            fit the module.
        UnsupportedModelError: no graph can be made of the model; the reason is told.
    """
    for name, value in (("batch size", batch_size), ("input size", input_size)):
        if value is not None and not 1 <= value <= MAX_SIZE:
            raise InputError(f"{name} is {value}; it must be from 1 to {MAX_SIZE:,}")
    name, own_batch_size, profile_of = _source(model, example_input, input_size)
    from learner.snapshot import load_snapshot
    from learner.workload import Workload

    loaded = load_snapshot(_locate(snapshot))
    key = device or loaded.source_device
    profile = profile_of()
    batch = batch_size or own_batch_size or profile.graph.fixed_batch_size or 1
    graph = profile.graph.at(batch)
    predictions = loaded.predict([Workload(graph=graph, step=profile.step)], key)
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
        model=name,
        device=key,
        batch_size=batch,
        snapshot=loaded.id,
        intervals=intervals,
        unfamiliar=tuple(
            metric for at, metric in enumerate(predictions.metrics) if predictions.outside[0, at]
        ),
        missing=missing,
        simulated_memory=profile.memory(batch),
        memory_source=profile.step_source,
        memory_remark=profile.step_refusal or profile.step_remark,
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

    home = Home.find()
    try:
        store = Store.open_to_read(home.database_url)
    except InputError as error:
        raise SnapshotError(f"no snapshot {snapshot!r}: {error}") from error
    with store:
        return snapshot_folder(store, home, snapshot)


def _source(
    model: object, example: torch.Tensor | None, input_size: int | None
) -> tuple[str, int | None, Callable[[], StaticProfile]]:
    """The model's name, its own batch size, and what makes its profile, once it has been checked.

    Raises:
        InputError: not a model, or one that does not fit what is given beside it.
    """
    if isinstance(model, str | Path):
        if example is not None:
            raise InputError("example_input is for modules; names and files know their input")
        if isinstance(model, Path) or model.endswith(".onnx") or os.sep in model:
            profile = _of_file(Path(model), input_size)
            return str(model), None, lambda: profile
        from profiler.zoo import check

        name = check(model)
        return name, None, lambda: _of_architecture(name, input_size)
    from torch import nn

    if not isinstance(model, nn.Module):
        raise InputError(
            f"the model is a {type(model).__name__}; give a timm name, an ONNX file or a module"
        )
    if example is None or input_size is not None:
        raise InputError(f"{type(model).__name__} is a module; give example_input, no input size")
    from profiler.model_input import Sample
    from profiler.static import static_profile

    sample = Sample.from_example(model, example)
    return type(model).__name__, example.shape[0], lambda: static_profile(model, sample)


def _of_file(path: Path, input_size: int | None) -> StaticProfile:
    from profiler.static import file_profile

    return file_profile(path, input_size)


def _of_architecture(architecture: str, input_size: int | None) -> StaticProfile:
    from profiler.static import static_profile
    from profiler.zoo import native_input_size

    size = native_input_size(architecture) if input_size is None else input_size
    if size is None:
        raise InputError(f"timm names no input size for {architecture}; give one, such as 224")
    return static_profile(architecture, size)
