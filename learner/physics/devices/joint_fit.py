"""Constants of many devices fitted together, from steps and from single kernels.

    constants = center + shared part + the device's own part + the host's own part

A single kernel is a step of one kernel, so both are evidence for the same constants, each source
with its own noise. Constants of a host (dispatch, a step, a copy) belong to where a source
measured, not to the device. Each part is Gaussian, and empirical Bayes learns how far the constants
of each group differ between devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from trappm.learner.physics.device_specs import DeviceSpec
from trappm.learner.physics.kernel_terms import Terms
from trappm.learner.physics.kernel_times import chunks_of, group_rows, linear, log_times
from trappm.learner.workload import Array, BoolArray, Workload

HOST_GROUPS = frozenset({"dispatch", "step", "host_copy"})
"""Constants of the host and its software."""
# Round numbers, unless a source is named.
SLOW_HOSTS = 1.7
"""Factor on the spread of dispatch: published steps of small batches waited for hosts six times as
slow as the first constant."""
NOISE_DEGREES = 3.0
"""Degrees of freedom of the Student-t error."""
LEAST_NOISE = 0.02
"""Least noise of the logarithm, below the error of docs/research/step_time.md alone."""
FEW = 10.0
"""Number of labels of a source that a fit can meet by chance, which raises the least noise."""
ITERATIONS = 40
CALM_STEPS, LEAST_GAIN = 2, 5e-3
"""Steps in a row that end a fit, and the gain that they stay below: nats times the root of the
number of labels."""
MOST_DAMPING = 1e8
"""Damping at which a fit ends without another step."""
ROUNDS = 3
"""Fits, each with spreads learned from the one before."""
PSEUDO_CONSTANTS = 6.0
"""Weight of the first spread, as a number of learned constants."""
CHANGES = (0.1, 3.0)
"""Bounds of a learned spread relative to the first."""


def spread_factor(moved: float, determined: float, smallest: float, largest: float) -> float:
    """Return the factor on a group's first spread by evidence maximization.

    A group's variance is the sum of its squared shifts over its degrees of freedom, the number of
    constants that labels determined (MacKay 1992, "Bayesian interpolation").

    Args:
        moved: Sum of the squared shifts, in first spreads.
        determined: Degrees of freedom.
        smallest, largest: Bounds of the factor.
    """
    variance = (PSEUDO_CONSTANTS + moved) / (PSEUDO_CONSTANTS + determined)
    return float(min(max(variance**0.5, smallest), largest))


def student_loss(errors: Tensor, scale: Tensor | float) -> float:
    """Return twice the negative log density of Student-t errors, up to a constant."""
    tails = torch.log1p(errors**2 / (NOISE_DEGREES * scale**2))
    return float((NOISE_DEGREES + 1) * tails.sum())


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
    def of_one(cls, centre: Tensor, spreads: Tensor) -> Distribution:
        """Return the prior of a device that shares its constants with no other."""
        nothing = torch.zeros_like(spreads)
        return cls(centre, nothing, spreads, nothing)

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
class _Part:
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

    def own(self, jacobian: Tensor) -> Tensor:
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
        self._parts = self._made()
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
        own = self.distribution
        unsure = torch.zeros_like(own.centre)
        for part, left in zip(self._parts, self._left(), strict=True):
            if part.key == ("shared", ""):
                unsure[part.constants] = part.spread**2 * left
        centre, device = self.constants(""), (own.device**2 + unsure).sqrt()
        return Distribution(centre, torch.zeros_like(centre), device, own.host)

    def _made(self) -> list[_Part]:
        distribution = self.distribution
        devices = sorted({e.device for e in self._evidence})
        hosts = sorted({e.host for e in self._evidence})
        wanted = [("shared", "", distribution.shared)]
        wanted += [("device", device, distribution.device) for device in devices]
        wanted += [("host", host, distribution.host) for host in hosts]
        parts = []
        for kind, key, spread in wanted:
            constants = torch.from_numpy(np.flatnonzero(spread.numpy() > 0))
            if not len(constants):
                continue
            concerned = [kind == "shared" or getattr(e, kind) == key for e in self._evidence]
            labels = torch.from_numpy(np.flatnonzero(np.array(concerned)[self._source]))
            shift = torch.zeros(len(constants), dtype=torch.float64)
            parts.append(_Part((kind, key), labels, constants, spread[constants], shift))
        return parts

    def _values(self) -> Tensor:
        constants = [self.constants(e.device, e.host) for e in self._evidence]
        own = zip(self._evidence, constants, strict=True)
        return torch.cat([log_times(e.chunks, at, e.spec) for e, at in own])

    def _linear(self) -> tuple[Tensor, Tensor]:
        """Return errors (n) and derivatives of the predictions by the constants (n, c)."""
        parts = [self._linear_of(evidence) for evidence in self._evidence]
        values, jacobians = zip(*parts, strict=True)
        return self._labels - torch.cat(values), torch.cat(jacobians)

    def _linear_of(self, evidence: Evidence) -> tuple[Tensor, Tensor]:
        constants = self.constants(evidence.device, evidence.host)
        return linear(evidence.chunks, constants, evidence.spec)

    def _scales(self, errors: Tensor) -> Tensor:
        """Return the noise scale of each label (n): its source's median, never rising."""
        for place in range(len(self._evidence)):
            own = errors[torch.from_numpy(self._source == place)]
            smallest = LEAST_NOISE * (1 + FEW / len(own))
            median = 1.48 * float(own.abs().median())
            self.noise[place] = max(smallest, min(float(self.noise[place]), median))
        return torch.from_numpy(self.noise[self._source])

    @staticmethod
    def _variances(errors: Tensor, scales: Tensor) -> Tensor:
        """Return variances of normal errors that act like Student-t ones (n)."""
        return (NOISE_DEGREES * scales**2 + errors**2) / (NOISE_DEGREES + 1)

    def _loss(self, errors: Tensor, scales: Tensor) -> float:
        """Return twice the negative log posterior at these scales, up to a constant."""
        shifts = sum(float((part.shift**2).sum()) for part in self._parts)
        return student_loss(errors, scales) + shifts

    def _fit(self) -> None:
        """Take damped Gauss-Newton steps on reweighted squares.

        `scipy.optimize.least_squares`, and so `map_fit`, decomposes labels + constants times
        constants at each step. For 120 kernels of one device it had not ended after 20 s of CPU
        time; this takes 0.2 s.
        """
        errors, jacobian = self._linear()
        damping, calm = 0.1, 0
        for _ in range(ITERATIONS):
            scales = self._scales(errors)
            variances = self._variances(errors, scales)
            loss, before = self._loss(errors, scales), [part.shift for part in self._parts]
            gain = -1.0
            while not gain >= 0 and damping < MOST_DAMPING:  # also where it is not a number
                self._step(errors, jacobian, variances, 1 + damping, before)
                gain = loss - self._loss(self._labels - self._values(), scales)
                damping = damping * 4 if not gain >= 0 else max(damping / 4, 1e-4)
            if not gain >= 0:
                for part, shift in zip(self._parts, before, strict=True):
                    part.shift = shift
                return
            calm = calm + 1 if gain < LEAST_GAIN * len(self._labels) ** 0.5 else 0
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
        owns = [part.own(jacobian) for part in self._parts]
        if self._has_many_labels():
            dense = self._dense(owns)
            precision = dense.T @ (dense / variances[:, None])
            precision.diagonal().add_(weight)
            slope = dense.T @ (errors / variances) - torch.cat(tuple(shifts))
            step = torch.linalg.solve(precision, slope)
            sizes = [len(shift) for shift in shifts]
            for part, moved, shift in zip(self._parts, step.split(sizes), shifts, strict=True):
                part.shift = shift + moved
            return
        wanted, covariance = errors.clone(), torch.diag(weight * variances)
        for part, own, shift in zip(self._parts, owns, shifts, strict=True):
            wanted[part.labels] += own @ shift / weight
            covariance[part.labels[:, None], part.labels] += own @ own.T
        solved = torch.linalg.solve(covariance, wanted)
        for part, own, shift in zip(self._parts, owns, shifts, strict=True):
            part.shift = shift + own.T @ solved[part.labels] - shift / weight

    def _has_many_labels(self) -> bool:
        """Return True if there are more labels than shifts."""
        return len(self._labels) > sum(len(part.constants) for part in self._parts)

    def _dense(self, owns: Sequence[Tensor]) -> Tensor:
        """Return the derivatives of all labels by all shifts (n, k)."""
        blocks = []
        for part, own in zip(self._parts, owns, strict=True):
            block = own.new_zeros(len(self._labels), own.shape[1])
            block[part.labels] = own
            blocks.append(block)
        return torch.cat(blocks, dim=1)

    def _left(self) -> list[Tensor]:
        """Return the posterior variance of each part's shifts."""
        errors, jacobian = self._linear()
        variances = self._variances(errors, self._scales(errors))
        owns = [part.own(jacobian) for part in self._parts]
        if self._has_many_labels():
            dense = self._dense(owns)
            precision = dense.T @ (dense / variances[:, None])
            precision.diagonal().add_(1.0)
            left = torch.linalg.inv(precision).diagonal()
            return list(left.split([own.shape[1] for own in owns]))
        covariance = torch.diag(variances)
        for part, own in zip(self._parts, owns, strict=True):
            covariance[part.labels[:, None], part.labels] += own @ own.T
        inverse = torch.linalg.inv(covariance)
        return [
            1.0 - (own * (inverse[part.labels[:, None], part.labels] @ own)).sum(0)
            for part, own in zip(self._parts, owns, strict=True)
        ]

    def _learn_spreads(self, first: Distribution) -> None:
        """Learn the spreads of the shared and the devices' own parts (`spread_factor`)."""
        left = list(zip(self._parts, self._left(), strict=True))
        is_alone = not bool((first.shared > 0).any())
        spreads = {"shared": first.shared.clone(), "device": first.device.clone()}
        for kind, begun in (("shared", first.shared), ("device", first.device)):
            for group, rows in group_rows():
                if group.common and is_alone:
                    continue  # one device says nothing about the spread of a common constant
                moved, determined = 0.0, 0.0
                for part, unsure in left:
                    if part.key[0] != kind:
                        continue
                    own = (part.constants >= rows.start) & (part.constants < rows.stop)
                    scale = part.spread[own] / begun[part.constants[own]]
                    moved += float(((part.shift[own] * scale) ** 2).sum())
                    determined += float((1.0 - unsure[own]).sum())
                spreads[kind][rows] = begun[rows] * spread_factor(moved, determined, *CHANGES)
        self.distribution = replace(self.distribution, **spreads)
        for part in self._parts:
            if part.key[0] in spreads:
                new = spreads[part.key[0]][part.constants]
                part.shift, part.spread = part.shift * part.spread / new, new
