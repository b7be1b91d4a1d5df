"""Constants of many devices fitted together, from steps and from single kernels.

    constants = center + shared part + the device's own part + the host's own part

A single kernel is a step of one kernel, so both are evidence for the same constants, each source
with its own noise. Constants of a host (dispatch, a step, a copy) belong to where a source
measured, not to the device. Each part is Gaussian, and empirical Bayes learns how far the constants
of each group differ between devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trappm.learner.interface import Array, BoolArray, Workload
from trappm.learner.physics.devices.known_devices import FILE
from trappm.learner.physics.step_time import (
    CALM_STEPS,
    CHANGES,
    ITERATIONS,
    MANY_LABELS,
    MAX_DAMPING,
    MIN_GAIN,
    ROUNDS,
    StepTimePrior,
    Terms,
    chunks_of,
    group_rows,
    linear,
    log_times,
    noise_scale,
    normal_variances,
    spread_factor,
    student_loss,
)
from trappm.profiler.devices.catalogue import DeviceSpec

LEARNED_FROM = (
    ("nodes/pgb_torchvision_step.csv", "pytorch-gpu-benchmark, other cards", "MIT", 181),
    ("rtx3090_train_step_amp_nchw.csv", "timm, RTX 3090", "Apache-2.0", 248),
    ("nodes/neusight_kernels_fp32_other_gpus.csv.gz", "neusight, P100", "MIT", 97),
)
"""File, source, licence and number of labels that `known_devices.safetensors` was learned from."""

HOST_GROUPS = frozenset({"dispatch", "step", "host_copy"})
"""Constants of the host and its software."""
# Round numbers, unless a source is named.
SLOW_HOSTS = 1.7
"""Factor on the spread of dispatch: published steps of small batches waited for hosts six times as
slow as the first constant."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """Measurements of one source on one device and host: steps, or single kernels."""

    device: str
    host: str
    spec: DeviceSpec
    workloads: Sequence[Workload]
    log_values: Array
    """Logarithms of times in ms (n)."""

    @cached_property
    def chunks(self) -> list[Terms]:
        """Terms of a few workloads at a time, which bounds the memory of their derivatives."""
        return chunks_of(self.workloads, self.spec)

    def at(self, chosen: BoolArray) -> Evidence:
        """Return the chosen labels (mask of shape (n))."""
        workloads = [self.workloads[i] for i in np.flatnonzero(chosen).tolist()]
        return replace(self, workloads=workloads, log_values=self.log_values[chosen])


@dataclass(frozen=True, eq=False)
class Distribution:
    """Prior of the logarithms of the constants (c)."""

    centre: Tensor
    shared: Tensor
    """Spread of the center itself."""
    device: Tensor
    host: Tensor

    @classmethod
    def first(cls, centre: Tensor, spreads: Tensor, *, of_devices: float) -> Distribution:
        """Return the prior before any label; devices differ by a share of the spreads."""
        device = of_devices * spreads
        host = torch.zeros_like(spreads)
        shared = spreads.clone()
        for group, rows in group_rows():
            if group.name in HOST_GROUPS:
                wide = SLOW_HOSTS if group.name == "dispatch" else 1.0
                device[rows], shared[rows], host[rows] = 0.0, 0.0, wide * spreads[rows]
            elif group.common:
                device[rows] = shared[rows] = spreads[rows] / 2
        return cls(centre, shared, device, host)


@dataclass(eq=False)
class _Component:
    """A part of the sum."""

    key: tuple[str, str]
    """`shared`, `device` or `host`, and its name."""
    labels: Tensor
    """Places of the labels that depend on it."""
    constants: Tensor
    """Places of the constants that it moves (k)."""
    spread: Tensor
    shift: Tensor
    """Shift of each constant in units of its spread (k)."""

    def derivatives(self, jacobian: Tensor) -> Tensor:
        """Return derivatives of its labels by its shifts."""
        return jacobian[self.labels][:, self.constants] * self.spread


class JointFit:
    """The most probable constants of all devices and hosts of some evidence."""

    def __init__(
        self, evidence: Sequence[Evidence], distribution: Distribution, *, learns: bool = False
    ) -> None:
        """Fit the constants.

        Args:
            evidence: Measurements on any number of devices.
            distribution: Prior of the constants.
            learns: Whether to learn the spreads of the groups, too.
        """
        self.distribution = distribution
        self._evidence = [part for part in evidence if len(part.workloads)]
        self._source = np.repeat(
            np.arange(len(self._evidence)), [len(e.workloads) for e in self._evidence]
        )
        self._labels = torch.from_numpy(np.concatenate([e.log_values for e in self._evidence]))
        self.noise = np.full(len(self._evidence), 0.5)
        """Noise scale of each source with labels."""
        self._parts = self._make_parts()
        first = distribution
        for _ in range(ROUNDS - 1 if learns else 0):
            self._fit()
            self._learn_spreads(first)
        self._fit()

    def constants(self, device: str, host: str = "") -> Tensor:
        """Return the constants of a device on a host (c), at the center for unknown ones."""
        values = self.distribution.centre.clone()
        for part in self._parts:
            if part.key in {("shared", ""), ("device", device), ("host", host)}:
                values[part.constants] += part.spread * part.shift
        return values

    def of_another_device(self) -> Distribution:
        """Return the prior of a device without labels here."""
        prior = self.distribution
        variance = torch.zeros_like(prior.centre)
        for part, posterior in zip(self._parts, self._posterior_variances(), strict=True):
            if part.key == ("shared", ""):
                variance[part.constants] = part.spread**2 * posterior
        centre, device = self.constants(""), (prior.device**2 + variance).sqrt()
        return Distribution(centre, torch.zeros_like(centre), device, prior.host)

    def _make_parts(self) -> list[_Component]:
        distribution = self.distribution
        devices = sorted({e.device for e in self._evidence})
        hosts = sorted({e.host for e in self._evidence})
        spreads = [("shared", "", distribution.shared)]
        spreads += [("device", device, distribution.device) for device in devices]
        spreads += [("host", host, distribution.host) for host in hosts]
        parts = []
        for kind, key, spread in spreads:
            constants = torch.from_numpy(np.flatnonzero(spread.numpy() > 0))
            if not len(constants):
                continue
            concerned = [kind == "shared" or getattr(e, kind) == key for e in self._evidence]
            labels = torch.from_numpy(np.flatnonzero(np.array(concerned)[self._source]))
            shift = torch.zeros(len(constants), dtype=torch.float64)
            parts.append(_Component((kind, key), labels, constants, spread[constants], shift))
        return parts

    def _values(self) -> Tensor:
        constants = [self.constants(e.device, e.host) for e in self._evidence]
        pairs = zip(self._evidence, constants, strict=True)
        return torch.cat([log_times(e.chunks, at, e.spec) for e, at in pairs])

    def _linear(self) -> tuple[Tensor, Tensor]:
        """Return errors (n) and derivatives of the predictions by the constants (n, c)."""
        parts = [self._linear_of(evidence) for evidence in self._evidence]
        values, jacobians = zip(*parts, strict=True)
        return self._labels - torch.cat(values), torch.cat(jacobians)

    def _linear_of(self, evidence: Evidence) -> tuple[Tensor, Tensor]:
        constants = self.constants(evidence.device, evidence.host)
        return linear(evidence.chunks, constants, evidence.spec)

    def _scales(self, errors: Tensor) -> Tensor:
        """Return the noise scale of each label (n): its source's."""
        for place in range(len(self._evidence)):
            of_source = errors[torch.from_numpy(self._source == place)]
            self.noise[place] = noise_scale(of_source, float(self.noise[place]))
        return torch.from_numpy(self.noise[self._source])

    def _loss(self, errors: Tensor, scales: Tensor) -> float:
        """Return twice the negative log posterior at these scales, up to a constant."""
        shifts = sum(float((part.shift**2).sum()) for part in self._parts)
        return student_loss(errors, scales) + shifts

    def _fit(self) -> None:
        """Take damped Gauss-Newton steps on reweighted squares, as `DeviceFit` does."""
        errors, jacobian = self._linear()
        damping, calm = 0.1, 0
        for _ in range(ITERATIONS):
            scales = self._scales(errors)
            variances = normal_variances(errors, scales)
            loss, before = self._loss(errors, scales), [part.shift for part in self._parts]
            gain = -1.0
            while not gain >= 0 and damping < MAX_DAMPING:  # also where it is not a number
                self._step(errors, jacobian, variances, 1 + damping, before)
                gain = loss - self._loss(self._labels - self._values(), scales)
                damping = damping * 4 if not gain >= 0 else max(damping / 4, 1e-4)
            if not gain >= 0:
                for part, shift in zip(self._parts, before, strict=True):
                    part.shift = shift
                return
            calm = calm + 1 if gain < MIN_GAIN * len(self._labels) ** 0.5 else 0
            if calm == CALM_STEPS:
                return
            errors, jacobian = self._linear()

    def _step(
        self,
        errors: Tensor,
        jacobian: Tensor,
        variances: Tensor,
        weight: float,
        shifts: Sequence[Tensor],
    ) -> None:
        """Take a step from these shifts, with this weight on zero.

        The system has the size of the labels (Woodbury's identity), or of the shifts if those are
        fewer.
        """
        jacobians = [part.derivatives(jacobian) for part in self._parts]
        if self._has_many_labels():
            dense = self._dense(jacobians)
            precision = dense.T @ (dense / variances[:, None])
            precision.diagonal().add_(weight)
            slope = dense.T @ (errors / variances) - torch.cat(tuple(shifts))
            step = torch.linalg.solve(precision, slope)
            sizes = [len(shift) for shift in shifts]
            for part, moved, shift in zip(self._parts, step.split(sizes), shifts, strict=True):
                part.shift = shift + moved
            return
        target, covariance = errors.clone(), torch.diag(weight * variances)
        for part, derivatives, shift in zip(self._parts, jacobians, shifts, strict=True):
            target[part.labels] += derivatives @ shift / weight
            covariance[part.labels[:, None], part.labels] += derivatives @ derivatives.T
        solution = torch.linalg.solve(covariance, target)
        for part, derivatives, shift in zip(self._parts, jacobians, shifts, strict=True):
            part.shift = shift + derivatives.T @ solution[part.labels] - shift / weight

    def _has_many_labels(self) -> bool:
        """Return True if there are more labels than shifts."""
        return len(self._labels) > sum(len(part.constants) for part in self._parts)

    def _dense(self, jacobians: Sequence[Tensor]) -> Tensor:
        """Return the derivatives of all labels by all shifts (n, k)."""
        blocks = []
        for part, derivatives in zip(self._parts, jacobians, strict=True):
            block = derivatives.new_zeros(len(self._labels), derivatives.shape[1])
            block[part.labels] = derivatives
            blocks.append(block)
        return torch.cat(blocks, dim=1)

    def _posterior_variances(self) -> list[Tensor]:
        """Return the posterior variance of each part's shifts."""
        errors, jacobian = self._linear()
        variances = normal_variances(errors, self._scales(errors))
        jacobians = [part.derivatives(jacobian) for part in self._parts]
        if self._has_many_labels():
            dense = self._dense(jacobians)
            precision = dense.T @ (dense / variances[:, None])
            precision.diagonal().add_(1.0)
            posterior = torch.linalg.inv(precision).diagonal()
            return list(posterior.split([derivatives.shape[1] for derivatives in jacobians]))
        covariance = torch.diag(variances)
        for part, derivatives in zip(self._parts, jacobians, strict=True):
            covariance[part.labels[:, None], part.labels] += derivatives @ derivatives.T
        inverse = torch.linalg.inv(covariance)
        return [
            1.0 - (derivatives * (inverse[part.labels[:, None], part.labels] @ derivatives)).sum(0)
            for part, derivatives in zip(self._parts, jacobians, strict=True)
        ]

    def _learn_spreads(self, first: Distribution) -> None:
        """Learn the spreads of the shared and the devices' own parts (`spread_factor`)."""
        variances = list(zip(self._parts, self._posterior_variances(), strict=True))
        is_alone = not bool((first.shared > 0).any())
        spreads = {"shared": first.shared.clone(), "device": first.device.clone()}
        for kind, initial in (("shared", first.shared), ("device", first.device)):
            for group, rows in group_rows():
                if group.common and is_alone:
                    continue  # one device says nothing about the spread of a common constant
                moved, determined = 0.0, 0.0
                for part, variance in variances:
                    if part.key[0] != kind:
                        continue
                    in_group = (part.constants >= rows.start) & (part.constants < rows.stop)
                    scale = part.spread[in_group] / initial[part.constants[in_group]]
                    moved += float(((part.shift[in_group] * scale) ** 2).sum())
                    determined += float((1.0 - variance[in_group]).sum())
                spreads[kind][rows] = initial[rows] * spread_factor(moved, determined, *CHANGES)
        self.distribution = replace(self.distribution, **spreads)
        for part in self._parts:
            if part.key[0] in spreads:
                new = spreads[part.key[0]][part.constants]
                part.shift, part.spread = part.shift * part.spread / new, new


def known_distribution() -> Distribution:
    """Return the distribution whose center and spreads the package has (`known_devices`)."""
    tensors = load_file(FILE)
    return Distribution(**{field.name: tensors[field.name] for field in fields(Distribution)})


def write(distribution: Distribution, path: Path = FILE) -> None:
    """Write the distribution that comes with the package."""
    tensors = {f.name: getattr(distribution, f.name).contiguous() for f in fields(Distribution)}
    save_file(tensors, path)


@dataclass(frozen=True, kw_only=True, eq=False)
class HostedWorkload(Workload):
    """A workload whose step time was measured on a named host."""

    host: str = ""
    """Host and software of the timing."""

    @classmethod
    def of_host(cls, workload: Workload, host: str) -> Self:
        """Return the workload, timed on this host."""
        return cls(**{f.name: getattr(workload, f.name) for f in fields(Workload)}, host=host)


def host_of(workload: Workload) -> str:
    """Return the host of a workload, or an empty text."""
    return workload.host if isinstance(workload, HostedWorkload) else ""


class SharedPrior(StepTimePrior):
    """Step-time prior by a joint fit with other devices, single kernels and several hosts."""

    def __init__(
        self,
        spec: DeviceSpec,
        constants: Tensor,
        known: Distribution,
        evidence: Sequence[Evidence] = (),
        of_hosts: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Set up the prior; `tensors` stores spec and constants only.

        Args:
            spec: Specification of the device.
            constants: Constants (c).
            known: Prior of the constants by other devices.
            evidence: Single kernels of this device.
            of_hosts: Constants by host, where labels came from several; elsewhere `constants`.
        """
        super().__init__(spec, constants, between=(known.device**2 + known.host**2).sqrt())
        self.known = known
        self.evidence = evidence
        self.of_hosts = of_hosts or {}

    @classmethod
    def like_others(
        cls, spec: DeviceSpec, known: Distribution, evidence: Sequence[Evidence] = ()
    ) -> Self:
        """Return the prior of a device without labels: others' constants, moved by its kernels."""
        plain = cls(spec, known.centre, known, evidence)
        return plain.refit([], np.zeros(0)) if evidence else plain  # type: ignore[return-value]

    def started_from(self, other: StepTimePrior) -> SharedPrior:
        known = replace(self.known, centre=other.constants)
        return SharedPrior(self.spec, other.constants, known, self.evidence)

    def log_values(self, workloads: Sequence[Workload]) -> Array:
        return self.logs_and_features(workloads)[0]

    def logs_and_features(self, workloads: Sequence[Workload]) -> tuple[Array, Array]:
        logs = np.zeros(len(workloads))
        features = np.zeros((len(workloads), sum(self.feature_groups)))
        for rows, own, constants in self._by_host(workloads):
            logs[rows], features[rows] = StepTimePrior(self.spec, constants).logs_and_features(own)
        return logs, features

    def _by_host(
        self, workloads: Sequence[Workload]
    ) -> Iterator[tuple[list[int], list[Workload], Tensor]]:
        """Yield the workloads of each host: places, workloads and constants."""
        rows: dict[str, list[int]] = {}
        for i, workload in enumerate(workloads):
            host = host_of(workload)
            rows.setdefault(host if host in self.of_hosts else "", []).append(i)
        for host, own in rows.items():
            constants = self.of_hosts.get(host, self.constants)
            yield own, [workloads[i] for i in own], constants

    def refit(
        self,
        workloads: Sequence[Workload],
        log_values: Array,
        *,
        log_above: Array | None = None,
        tightness: float = 1.0,
        near: StepTimePrior | None = None,
    ) -> StepTimePrior:
        """Fit constants to labels of any hosts and single kernels, with a prior by other devices.

        An unknown host has the constants of the one with most labels. Of `MANY_LABELS`, other
        devices count no more.
        """
        known = np.isfinite(log_values)
        if known.sum() >= MANY_LABELS:
            plain = StepTimePrior(self.spec, self.constants)
            return plain.refit(
                workloads, log_values, log_above=log_above, tightness=tightness, near=near
            )
        hosts = np.array([host_of(workload) for workload in workloads], dtype=np.str_)
        names, counts = np.unique(hosts[known], return_counts=True)
        labelled = Evidence("", "", self.spec, workloads, np.asarray(log_values, dtype=np.float64))
        steps = [
            replace(labelled.at((hosts == host) & known), host=f"steps {host}") for host in names
        ]
        kernels = [replace(part, device="") for part in self.evidence]
        if not steps and not kernels:
            return self
        fit = JointFit([*steps, *kernels], self.known)
        of_hosts = {host: fit.constants("", f"steps {host}") for host in names.tolist()}
        constants = of_hosts[names[np.argmax(counts)]] if of_hosts else fit.constants("")
        return SharedPrior(self.spec, constants, self.known, self.evidence, of_hosts)
