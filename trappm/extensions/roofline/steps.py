"""A step of a model under the roofline of a device: its kernels as points, and what bounds them.

    intensity   operations per byte; attained   operations per second
    bound       launches, where half of the time is the launch; else the ceiling at its intensity:
                the peak of its type, or the bandwidth of memory

A kernel that multiplies nothing does one operation per element that it reads or writes, whichever
are more (Williams, Waterman and Patterson, CACM 2009, for what is drawn).

Kernel times come from the device's heads, where a snapshot has some that were trained on labels;
else from constants that all devices share, moved by the device's own kernels if any were timed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from trappm.extensions.roofline.roofs import BANDWIDTH, COMPUTE, LAUNCH, KnownDevice
from trappm.learner.heads.device_heads import Heads
from trappm.learner.heads.predictions import StepSettings, TrainedHeads
from trappm.learner.physics.device_specs import CPU, spec_of
from trappm.learner.physics.devices.joint_fit import Distribution
from trappm.learner.physics.devices.known_devices import known_devices, measured_evidence
from trappm.learner.physics.kernel_terms import PRODUCTS, Peak, terms_of
from trappm.learner.physics.kernel_times import Lookup, spreads, starting_constants, times_of
from trappm.learner.physics.step_time_prior import StepTimePrior
from trappm.learner.workload import Workload
from trappm.prediction.device_names import key_among
from trappm.profiler.errors import InputError, SnapshotError, UnsupportedModelError
from trappm.profiler.simulation.kernel_profile import KernelKind, Kernels, KernelTable, Pass, Size
from trappm.profiler.text import number_text

if TYPE_CHECKING:
    from trappm.learner.heads.metric_head import Head
    from trappm.learner.physics.prior import Prior
    from trappm.prediction.models.subjects import Subject
    from trappm.prediction.question import Question
    from trappm.profiler.records import Phase

Array = npt.NDArray[np.float64]

BOUNDS = (COMPUTE, BANDWIDTH, LAUNCH)
_MOSTLY = 0.5
"""Share of a kernel's time from which on its launch bounds it."""
_OPTIMIZER_FLOPS = 2.0
"""For each parameter: a multiplication and an addition, of SGD; others do a few more."""


@dataclass(frozen=True, kw_only=True)
class KernelPoint:
    """Equal kernels of a step."""

    name: str
    size: str
    """Of a product, its rows, columns and depth; of others, what they read and write."""
    count: int
    data_type: str
    """`fp32`, `tf32`, `fp16` or `bf16`."""
    time_ms: float
    """Of all of them together, as `share`."""
    share: float
    """Of the step."""
    flop: float
    """Of one, as `bytes`."""
    bytes: float
    launch_ms: float
    """What all of them would take if they did nothing."""
    bound: str = LAUNCH
    """`compute`, `bandwidth` or `launch`."""

    @property
    def intensity(self) -> float:
        """FLOP a byte."""
        return self.flop / self.bytes

    @property
    def tflops(self) -> float:
        """Attained, in TFLOP/s."""
        return self.flop * self.count / self.time_ms / 1e9


@dataclass(frozen=True, kw_only=True, eq=False)
class StepKernels:
    """The kernels of a step on a device."""

    points: tuple[KernelPoint, ...]
    """The longest first."""
    shares: Mapping[str, float]
    """Of the step, by `BOUNDS`; together 1. Launches have all waiting for the host."""


def step_kernels(
    prior: StepTimePrior, workload: Workload, device: KnownDevice, step_time_ms: float
) -> StepKernels:
    """The kernels of a workload at the time that a prior gives to each.

    Args:
        prior: of the device.
        workload: with kernels.
        device: whose ceilings say what bounds a kernel.
        step_time_ms: of the whole step, as its head predicts it: what the head adds to the prior
            is spread over all kernels.

    Raises:
        InputError: a workload without kernels, or a device without ceilings of compute and memory.
    """
    terms = terms_of([workload], prior.spec)
    with torch.no_grad():
        times = times_of(terms, Lookup(prior.constants), prior.spec)
        launch = Lookup(prior.constants).pick("launch", torch.arange(3), torch.zeros(3))
        launch_ms = (launch.exp() * prior.spec.launch_us / 1e3).numpy()
    factor = step_time_ms / float(times.total())
    assert workload.kernels is not None  # noqa: S101  (`terms_of` has looked)
    kernels = workload.kernels.at(workload.batch_size, workload.phase)
    multiplies = kernels.table.kinds < PRODUCTS
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
    return StepKernels(points=tuple(points), shares=shares)


def _bound(device: KnownDevice, point: KernelPoint) -> str:
    if point.launch_ms > _MOSTLY * point.time_ms:
        return LAUNCH
    peaks, memory = device.of(COMPUTE), device.memory
    peak = peaks.get(point.data_type) or peaks.get("fp32")
    if peak is None or memory is None:
        raise InputError(
            f"what bounds a step on {device.key} is unknown, since its ceilings of compute and of "
            "memory are not both known; measure them: trappm measure --kernels --device "
            f"{device.key}"
        )
    ridge = 1000 * peak.value / memory.value
    return COMPUTE if point.intensity > ridge else BANDWIDTH


def _bytes(kernels: Kernels) -> Array:
    moved: Array = kernels.sizes[:, : Size.WRITTEN_BYTES + 1].sum(axis=1)
    return np.maximum(moved, 1.0)


def _operations(kernels: Kernels) -> Array:
    """Of one kernel each (n)."""
    width = np.where(kernels.table.half, 2, 4)
    elements = kernels.sizes[:, : Size.WRITTEN_BYTES + 1].max(axis=1) / width
    flops: Array = np.where(kernels.table.kinds < PRODUCTS, kernels.sizes[:, Size.FLOPS], elements)
    return np.maximum(flops, 1.0)


def _name(table: KernelTable, i: int) -> str:
    """Such as `grouped conv 3x3/2, weight gradient`."""
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
    return f"{words}, {which.name.lower().replace('_', ' ') if kind < PRODUCTS else 'backward'}"


def _size(kernels: Kernels, i: int) -> str:
    """Of a product, its rows, columns and depth; of others, what they read and write."""
    if kernels.table.kinds[i] >= PRODUCTS:
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
class RoofedStep:
    """A step of a model on a device."""

    model: str
    device: KnownDevice
    phase: Phase
    batch_size: int
    settings: StepSettings
    step_time_ms: float
    source: str
    """What the times rest on."""
    kernels: StepKernels
    doubled: Doubled | None
    """None of a model that knows one batch size only."""

    @property
    def samples_per_s(self) -> float:
        return 1000 * self.batch_size / self.step_time_ms


def roofed_steps(
    question: Question, subject: Subject, devices: Sequence[KnownDevice]
) -> list[RoofedStep]:
    """The same step on each of these devices.

    Raises:
        InputError: nobody has listed the card of a device, or its ceilings are not known, or the
            model has another batch size.
        UnsupportedModelError: its kernels cannot be traced.
    """
    heads = [_trained(question, device) for device in devices]
    settings = step_settings(question, devices)
    profile = subject.profile()
    fixed = profile.graph.fixed_batch_size
    batch_size = question.batch_size or subject.batch_size or fixed or 1
    traced = subject.step(settings)
    if isinstance(traced, str) or traced.kernels is None:
        why = traced if isinstance(traced, str) else "its trace has none"
        raise UnsupportedModelError(f"the kernels of {subject.name} cannot be traced: {why}")

    def workload(size: int) -> Workload:
        return Workload.of(
            profile,
            traced,
            settings,
            phase=question.phase,
            batch_size=size,
            with_kernels=True,
        )

    workloads = [workload(batch_size)] + ([] if fixed else [workload(2 * batch_size)])
    rows = []
    for device, (head, source, _) in zip(devices, heads, strict=True):
        prior = _without_labels(device) if head is None else head.prior
        assert isinstance(prior, StepTimePrior)  # noqa: S101  (`_trained` takes no other)
        times_ms = (
            np.exp(prior.log_values(workloads)) if head is None else head.predict(workloads).median
        )
        first_ms, *more_ms = times_ms.tolist()
        rows.append(
            RoofedStep(
                model=subject.name,
                device=device,
                phase=question.phase,
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


def step_settings(question: Question, devices: Sequence[KnownDevice]) -> StepSettings:
    """The settings of a step, the same on all devices.

    What the question leaves open is as in most labels of the first device that has heads of
    kernels; else fp32, contiguous, SGD.
    """
    known = (trained for device in devices if (trained := _trained(question, device)[2]))
    return question.settings(next(known, _UNTRAINED))


_UNTRAINED = TrainedHeads(Heads(heads={}, label_count=0), ())


def _trained(
    question: Question, device: KnownDevice
) -> tuple[Head[Prior] | None, str, TrainedHeads | None]:
    """The head that predicts step times from kernels, what it rests on, and all heads if labelled.

    Kernels of the device itself are better than a head without labels.
    """
    without_labels: tuple[Head[Prior], str] | None = None
    for snapshot in question.snapshots:
        try:
            key = key_among([snapshot.manifest], device.key)
            trained = snapshot.trained(key, question.phase)
        except SnapshotError:
            continue
        heads = trained.heads
        head = heads.heads.get("step_time_ms") if isinstance(heads, Heads) else None
        if head is None or not isinstance(head.prior, StepTimePrior):
            continue
        basis = snapshot.bases(key, question.phase).get("step_time_ms", "labels")
        source = f"{basis}, in snapshot {snapshot.id[:8]}"
        if head.familiarity is not None:
            return head, source, trained
        without_labels = without_labels or (head, source)
    if device.kernels:
        return None, "its kernels, and what devices have in common", None
    if without_labels is not None:
        return *without_labels, None
    return None, "its data sheet, and what devices have in common", None


def _without_labels(device: KnownDevice) -> StepTimePrior:
    """Raises InputError: nobody has listed the card."""
    spec = spec_of(device.card)
    # What is known of devices was learned on GPUs.
    everything = Distribution.first(starting_constants(), spreads(1.0), of_devices=1.0)
    common = everything if spec is CPU else known_devices()
    return StepTimePrior.like_others(spec, common, measured_evidence(spec, device.kernels))
