"""Kernels of a training or inference step as points under a device's roofline, with their bounds.

    intensity   operations per byte; attained   operations per second
    bound       launch, if it takes more than half of the time; else the ceiling at the intensity:
                the peak of the data type, or the memory bandwidth

A kernel that is not a product does one operation per element that it reads or writes, whichever
number is larger. The roofline model is from Williams, Waterman and Patterson, CACM 2009.

Kernel times come from the device's heads if a snapshot has heads for it; else from its data sheet
and constants shared by all devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from trappm.extensions.roofline.roofs import (
    BANDWIDTH,
    COMPUTE,
    LAUNCH,
    RooflineDevice,
    roofline_device,
)
from trappm.learner.heads.physics_heads import Heads, kernel_head
from trappm.learner.interface import TrainedHeads, Workload
from trappm.learner.physics.devices.known_devices import known_devices
from trappm.learner.physics.step_time import (
    PRODUCT_KINDS,
    Lookup,
    Peak,
    StepTimePrior,
    terms_of,
    times_of,
)
from trappm.profiler.devices.catalogue import spec_of
from trappm.profiler.errors import SnapshotError, UnsupportedModelError
from trappm.profiler.records import StepSettings, number_text
from trappm.profiler.traced_step import KernelKind, Kernels, KernelTable, Pass, Size

if TYPE_CHECKING:
    from trappm.learner.heads.physics_heads import Head
    from trappm.prediction.models import Subject
    from trappm.prediction.selection import Selection
    from trappm.profiler.records import Phase

Array = npt.NDArray[np.float64]

BOUNDS = (COMPUTE, BANDWIDTH, LAUNCH)
_MIN_LAUNCH_SHARE = 0.5
"""A launch that takes more than this share of a kernel's time bounds the kernel."""
_OPTIMIZER_FLOPS = 2.0
"""FLOP per parameter of SGD: a multiplication and an addition; other optimizers do a few more."""


@dataclass(frozen=True, kw_only=True)
class KernelPoint:
    """A group of identical kernels of a step."""

    name: str
    size: str
    """Rows, columns and depth of a product; bytes read and written of other kernels."""
    count: int
    data_type: str
    """`fp32`, `tf32`, `fp16` or `bf16`."""
    time_ms: float
    """Time of all kernels of the group; `share` is their share of the step."""
    share: float
    flop: float
    """FLOP of one kernel; `bytes` are also per kernel."""
    bytes: float
    launch_ms: float
    """Launch time of all kernels of the group."""
    bound: str = LAUNCH
    """`compute`, `bandwidth` or `launch`."""

    @property
    def intensity(self) -> float:
        """Return the FLOP per byte."""
        return self.flop / self.bytes

    @property
    def tflops(self) -> float:
        """Return the attained TFLOP/s."""
        return self.flop * self.count / self.time_ms / 1e9


@dataclass(frozen=True, kw_only=True, eq=False)
class RooflineKernels:
    """The kernels of a step on a device."""

    points: tuple[KernelPoint, ...]
    """Kernels by decreasing time."""
    shares: Mapping[str, float]
    """Share of the step time by bound (`BOUNDS`), sum 1; launches include waiting for the host."""


def step_kernels(
    prior: StepTimePrior, workload: Workload, device: RooflineDevice, step_time_ms: float
) -> RooflineKernels:
    """Return the kernels of a workload with the times that a prior predicts.

    Args:
        prior: Prior of the device.
        workload: Workload with kernels.
        device: Device with the ceilings that determine the bounds.
        step_time_ms: Predicted time of the whole step; its ratio to the prior's time scales the
            times of all kernels.

    Raises:
        InputError: The workload has no kernels.
    """
    terms = terms_of([workload], prior.spec)
    with torch.no_grad():
        times = times_of(terms, Lookup(prior.constants), prior.spec)
        launch = Lookup(prior.constants).pick("launch", torch.arange(3), torch.zeros(3))
        launch_ms = (launch.exp() * prior.spec.launch_us / 1e3).numpy()
    factor = step_time_ms / float(times.total())
    assert workload.kernels is not None  # noqa: S101  (`terms_of` has looked)
    kernels = workload.kernels.at(workload.batch_size)
    multiplies = kernels.table.kinds < PRODUCT_KINDS
    time_ms = np.empty(len(kernels.table))
    time_ms[multiplies], time_ms[~multiplies] = times.products.numpy(), times.streams.numpy()
    half = "bf16" if workload.precision.needs_bf16 else "fp16"
    types = np.where(kernels.table.half, half, "fp32").astype(object)
    types[np.flatnonzero(multiplies)[(terms.products.peak == Peak.TF32).numpy()]] = "tf32"
    flops, moved, counts = _operations(kernels), _bytes(kernels), kernels.table.counts.tolist()
    points = [
        KernelPoint(
            name=_name(kernels.table, i),
            size=_size(kernels, i),
            count=count,
            data_type=types[i],
            time_ms=factor * float(time_ms[i]),
            share=float(time_ms[i]) * factor / step_time_ms,
            flop=float(flops[i]),
            bytes=float(moved[i]),
            launch_ms=factor * count * float(launch_ms[0 if multiplies[i] else 1]),
        )
        for i, count in enumerate(counts)
    ]
    if updated := float(terms.optimizer_bytes):
        points.append(
            KernelPoint(
                name=f"optimizer step, {workload.optimizer}",
                size=f"{number_text(updated / 2**20, 3)} MiB",
                count=1,
                data_type="fp32",
                time_ms=factor * float(times.optimizer),
                share=float(times.optimizer) * factor / step_time_ms,
                flop=_OPTIMIZER_FLOPS * workload.kernels.parameters,
                bytes=updated,
                launch_ms=factor * workload.kernels.parameter_tensors * float(launch_ms[2]),
            )
        )
    points = [replace(point, bound=_bound(device, point)) for point in points]
    points.sort(key=lambda point: -point.time_ms)
    shares = {bound: sum(p.share for p in points if p.bound == bound) for bound in BOUNDS}
    shares[LAUNCH] += max(0.0, 1.0 - sum(shares.values()))
    return RooflineKernels(points=tuple(points), shares=shares)


def _bound(device: RooflineDevice, point: KernelPoint) -> str:
    if point.launch_ms > _MIN_LAUNCH_SHARE * point.time_ms:
        return LAUNCH
    peaks = device.of(COMPUTE)
    peak = peaks.get(point.data_type) or peaks["fp32"]
    ridge = 1000 * peak.value / device.memory.value
    return COMPUTE if point.intensity > ridge else BANDWIDTH


def _bytes(kernels: Kernels) -> Array:
    moved: Array = kernels.sizes[:, : Size.WRITTEN_BYTES + 1].sum(axis=1)
    return np.maximum(moved, 1.0)


def _operations(kernels: Kernels) -> Array:
    """Return the FLOP per kernel, shape (n,)."""
    width = np.where(kernels.table.half, 2, 4)
    elements = kernels.sizes[:, : Size.WRITTEN_BYTES + 1].max(axis=1) / width
    flops: Array = np.where(
        kernels.table.kinds < PRODUCT_KINDS, kernels.sizes[:, Size.FLOPS], elements
    )
    return np.maximum(flops, 1.0)


def _name(table: KernelTable, i: int) -> str:
    """Return a description such as `grouped conv 3x3/2, weight gradient`."""
    kind, which = KernelKind(table.kinds[i]), Pass(table.passes[i])
    words = kind.name.lower().replace("_", " ")
    if kind <= KernelKind.DEPTHWISE:
        window, stride = int(table.windows[i]), int(table.strides[i])
        side = round(window**0.5)
        words = f"{words} conv" if kind >= KernelKind.GROUPED else "conv"
        words += f" {side}x{side}" if side**2 == window else f" of {window}"
        words += f"/{stride}" if stride > 1 else ""
    if which is Pass.FORWARD:
        return words
    return (
        f"{words}, {which.name.lower().replace('_', ' ') if kind < PRODUCT_KINDS else 'backward'}"
    )


def _size(kernels: Kernels, i: int) -> str:
    """Return rows x columns x depth of a product, or the bytes moved by another kernel."""
    if kernels.table.kinds[i] >= PRODUCT_KINDS:
        return f"{number_text(_bytes(kernels)[i] / 2**20, 3)} MiB"
    rows, columns, depth, products = kernels.sizes[i, Size.ROWS :]
    times = f"{products:.0f} of " if products > 1 else ""
    return f"{times}{rows:.0f}x{columns:.0f}x{depth:.0f}"


@dataclass(frozen=True, kw_only=True)
class Doubled:
    """The step with twice the batch."""

    batch_size: int
    step_time_ms: float
    samples_per_s: float


@dataclass(frozen=True, kw_only=True, eq=False)
class RooflineStep:
    """A step of a model on a device."""

    model: str
    device: RooflineDevice
    phase: Phase
    batch_size: int
    settings: StepSettings
    step_time_ms: float
    source: str
    """Source of the times."""
    kernels: RooflineKernels
    doubled: Doubled | None
    """None if the batch size of the model is fixed."""

    @property
    def samples_per_s(self) -> float:
        return 1000 * self.batch_size / self.step_time_ms


def roofline_devices(selection: Selection, names: Sequence[str] | None) -> list[RooflineDevice]:
    """Return the devices with these names; the usual device of `trappm predict` without a name.

    Raises:
        SnapshotError: As `Selection.device_keys`.
        InputError: As `Selection.device_keys`, or a device is not in the catalogue.
    """
    keys = selection.device_keys(None, names or None)
    return [roofline_device(key, selection.snapshot_for(key).card(key)) for key in keys]


def roofline_steps(
    selection: Selection, subject: Subject, devices: Sequence[RooflineDevice]
) -> list[RooflineStep]:
    """Return the step on each of the devices.

    Raises:
        InputError: The batch size differs from the fixed one of the model.
        UnsupportedModelError: The kernels cannot be traced.
    """
    heads = [_trained(selection, device) for device in devices]
    settings = step_settings(selection, devices)
    batch_size = selection.question.batch_size or subject.batch_size
    trace = subject.trace(settings, selection.question.phase, batch_size)
    if trace.kernels is None:
        raise UnsupportedModelError(
            f"the kernels of {subject.name} cannot be traced: {trace.refusal}"
        )
    batch_size = batch_size or trace.batch_size or 1

    def workload(size: int) -> Workload:
        return Workload.of(trace, settings, batch_size=size, with_kernels=True)

    workloads = [workload(batch_size)] + ([] if trace.batch_size else [workload(2 * batch_size)])
    rows = []
    for device, (head, source, _) in zip(devices, heads, strict=True):
        prior = _shared_prior(device) if head is None else head.prior
        times_ms = (
            np.exp(prior.log_values(workloads)) if head is None else head.predict(workloads).median
        )
        first_ms, *more_ms = times_ms.tolist()
        rows.append(
            RooflineStep(
                model=subject.name,
                device=device,
                phase=selection.question.phase,
                batch_size=batch_size,
                settings=settings,
                step_time_ms=first_ms,
                source=source,
                kernels=step_kernels(prior, workloads[0], device, first_ms),
                doubled=Doubled(
                    batch_size=2 * batch_size,
                    step_time_ms=more_ms[0],
                    samples_per_s=2000 * batch_size / more_ms[0],
                )
                if more_ms
                else None,
            )
        )
    return rows


def step_settings(selection: Selection, devices: Sequence[RooflineDevice]) -> StepSettings:
    """Return the settings of a step, the same for all devices.

    Settings that the question leaves open are the most common ones among the labels of the first
    device with kernel-based heads; without such a device: fp32, contiguous, SGD.
    """
    known = (trained for device in devices if (trained := _trained(selection, device)[2]))
    return selection.settings(next(known, _UNTRAINED))


_UNTRAINED = TrainedHeads(Heads(heads={}, label_count=0), ())


def _trained(
    selection: Selection, device: RooflineDevice
) -> tuple[Head[StepTimePrior] | None, str, TrainedHeads | None]:
    """Return the kernel-based step time head, its source, and all heads if trained on labels."""
    without_labels: tuple[Head[StepTimePrior], str] | None = None
    for snapshot in selection.snapshots:
        try:
            trained = snapshot.trained(device.key, selection.question.phase)
        except SnapshotError:
            continue
        head = kernel_head(trained.heads)
        if head is None:
            continue
        basis = snapshot.bases(device.key, selection.question.phase).get("step_time_ms", "labels")
        source = f"{basis}, in snapshot {snapshot.id[:8]}"
        if head.familiarity is not None:
            return head, source, trained
        without_labels = without_labels or (head, source)
    if without_labels is not None:
        return *without_labels, None
    return None, "its data sheet and constants shared by all devices", None


def _shared_prior(device: RooflineDevice) -> StepTimePrior:
    """Return a prior from the data sheet and constants shared by all devices."""
    return StepTimePrior(spec_of(device.card), known_devices().centre)
