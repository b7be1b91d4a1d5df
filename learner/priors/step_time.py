"""The physical prior of a step's time: kernels one by one, with constants of the device.

`kernel_times` has the formula. Its constants start from a specification sheet, so the prior
says something without any label; labels move them, each as far as its own prior lets it. A new
device starts from another one's: what a kernel reaches of the peak is much the same on both, the
peaks are not. docs/step_time.md has each term's reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Self

import numpy as np
import torch
from torch import Tensor

from learner.priors.device_specs import UNKNOWN_GPU, DeviceSpec
from learner.priors.kernel_terms import Array, Terms, terms_of
from learner.priors.kernel_times import SHARE_GROUPS, Lookup, spreads, starting_constants, times_of
from learner.workload import Workload
from profiler.errors import InputError

NOISE_DEGREES = 3.0
"""Of freedom of the Student-t error: some models surprise everybody."""
LEAST_NOISE = 0.02
ITERATIONS = 40
CHUNK = 500
"""So many workloads at a time: the derivatives of all kernels take memory."""


class StepTimePrior:
    """Simulated time of a step in ms. Instances do not change; see `learner.priors.prior.Prior`."""

    def __init__(self, spec: DeviceSpec = UNKNOWN_GPU, constants: Tensor | None = None) -> None:
        """
        Args:
            spec: of the device whose labels these are or will be.
            constants: as another instance has them (c); by default those of no label.
        """
        self.spec = spec
        self.constants = starting_constants() if constants is None else constants

    def started_from(self, other: Self) -> Self:
        """This device with the constants of another: as far from its specification as there."""
        return type(self)(self.spec, other.constants)

    @property
    def feature_groups(self) -> tuple[int, ...]:
        return SHARE_GROUPS

    def log_values(self, workloads: Sequence[Workload]) -> Array:
        if not len(workloads):
            return np.zeros(0)
        with torch.no_grad():
            times = times_of(terms_of(workloads, self.spec), Lookup(self.constants), self.spec)
        values: Array = times.total().log().numpy()
        return values

    def features(self, workloads: Sequence[Workload]) -> Array:
        """Shares of the step by kind and direction of its kernels, and its size (n, f)."""
        if not len(workloads):
            return np.zeros((0, sum(self.feature_groups)))
        with torch.no_grad():
            terms = terms_of(workloads, self.spec)
            shares = times_of(terms, Lookup(self.constants), self.spec).shares(terms)
        values: Array = shares.numpy()
        return values

    def refit(
        self,
        workloads: Sequence[Workload],
        log_values: Array,
        *,
        log_above: Array | None = None,
        tightness: float = 1.0,
    ) -> Self:
        """Constants fitted to labels; bounds (`log_above`) say little of a time and are left out.

        Student-t errors of the logarithm, Gaussian priors: the most probable constants.

        Raises:
            InputError: workloads and labels differ in number.
        """
        if len(workloads) != len(log_values):
            raise InputError(f"{len(workloads)} workloads and {len(log_values)} labels")
        known = np.isfinite(log_values)
        if not known.any():
            return self
        labels = torch.from_numpy(np.asarray(log_values, dtype=np.float64)[known])
        some = [w for w, k in zip(workloads, known, strict=True) if k]
        chunks = _chunks(some, self.spec)
        constants = _fit(chunks, labels, self.constants, spreads(tightness), self.spec)
        return type(self)(self.spec, constants)

    def sensitivities(self, workloads: Sequence[Workload]) -> Array:
        if not len(workloads):
            return np.zeros((0, len(self.constants)))
        _, jacobian = _linear(_chunks(workloads, self.spec), self.constants, self.spec)
        values: Array = (jacobian * spreads(1.0)).numpy()
        return values

    def moved(self, by: Array) -> Self:
        return type(self)(self.spec, self.constants + torch.from_numpy(by) * spreads(1.0))

    def tensors(self) -> dict[str, Tensor]:
        spec = torch.tensor(list(asdict(self.spec).values()), dtype=torch.float64)
        return {"constants": self.constants.clone(), "spec": spec}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Self:
        constants, spec = tensors["constants"], tensors["spec"].tolist()
        if constants.shape != starting_constants().shape or len(spec) != len(fields(DeviceSpec)):
            raise ValueError(
                f"{tuple(constants.shape)} constants and {len(spec)} numbers of a spec"
            )
        if not constants.isfinite().all() or min(spec) <= 0:
            raise ValueError("constants that are not finite, or a spec that is not positive")
        half, full, bandwidth, cached, units, launch, dispatch = spec
        return cls(
            DeviceSpec(half, full, bandwidth, cached, round(units), launch, dispatch),
            constants.double(),
        )


def _chunks(workloads: Sequence[Workload], spec: DeviceSpec) -> list[Terms]:
    starts = range(0, len(workloads), CHUNK)
    return [terms_of(workloads[start : start + CHUNK], spec) for start in starts]


def _linear(chunks: Sequence[Terms], constants: Tensor, spec: DeviceSpec) -> tuple[Tensor, Tensor]:
    """Logarithm of the step times (n), and its derivatives by the constants (n, c)."""
    values, jacobians = [], []
    for terms in chunks:
        lookup = Lookup(constants, tracked=True)
        logs = times_of(terms, lookup, spec).total().log()
        jacobians.append(lookup.jacobian(logs))
        values.append(logs.detach())
    return torch.cat(values), torch.cat(jacobians)


def _fit(
    chunks: Sequence[Terms], labels: Tensor, centre: Tensor, spread: Tensor, spec: DeviceSpec
) -> Tensor:
    """The most probable constants, by damped Gauss-Newton steps on reweighted squares.

    Labels are weighted by how far off they are (Student-t), with a scale from the median error.
    """

    def state(at: Tensor) -> tuple[Tensor, Tensor]:
        values, jacobian = _linear(chunks, at, spec)
        return labels - values, jacobian * spread

    shift = torch.zeros_like(centre)
    error, jacobian = state(centre)
    damping, scale = 1e-2, 0.5
    for _ in range(ITERATIONS):
        typical = 1.48 * float(error.abs().median())
        scale = max(LEAST_NOISE, min(scale, typical))
        variance = NOISE_DEGREES * scale**2
        weights = (NOISE_DEGREES + 1) / (variance + error**2)

        def loss(e: Tensor, s: Tensor, v: float = variance) -> float:
            return float((NOISE_DEGREES + 1) * torch.log1p(e**2 / v).sum() + (s**2).sum())

        weighted = jacobian * weights[:, None]
        curvature = weighted.T @ jacobian
        curvature.diagonal().add_(1 + damping)
        gradient = weighted.T @ error - shift
        step = torch.linalg.solve(curvature, gradient)
        new_error, new_jacobian = state(centre + spread * (shift + step))
        gain = loss(error, shift) - loss(new_error, shift + step)
        if gain >= 0:
            shift, error, jacobian = shift + step, new_error, new_jacobian
            damping = max(damping / 4, 1e-3)
            if gain < 1e-3 * len(labels) ** 0.5:
                break
        else:
            damping *= 8
    return centre + spread * shift
