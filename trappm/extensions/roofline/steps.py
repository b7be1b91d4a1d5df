"""A step of a model under the roofline of a device: what bounds it, and what twice the batch does.

How long its kernels take comes from the device's heads, where a snapshot has some of labels; else
from constants that all devices share, moved by the device's own kernels if any were timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trappm.extensions.roofline.step_kernels import StepKernels, step_kernels
from trappm.learner.heads.device_heads import Heads
from trappm.learner.heads.predictions import StepSettings, TrainedHeads
from trappm.learner.physics.device_specs import CPU, spec_of
from trappm.learner.physics.devices.joint_fit import Distribution
from trappm.learner.physics.devices.known_devices import known_devices, measured_evidence
from trappm.learner.physics.kernel_times import spreads, starting_constants
from trappm.learner.physics.step_time_prior import StepTimePrior
from trappm.learner.workload import Workload
from trappm.prediction.device_names import key_among
from trappm.profiler.errors import SnapshotError, UnsupportedModelError

if TYPE_CHECKING:
    from trappm.extensions.roofline.roofs import KnownDevice
    from trappm.learner.heads.metric_head import Head
    from trappm.learner.physics.prior import Prior
    from trappm.prediction.models.subjects import Subject
    from trappm.prediction.question import Question
    from trappm.profiler.records import Phase


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
