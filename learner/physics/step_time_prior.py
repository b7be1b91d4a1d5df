"""Physical prior of step times: kernels one by one, with constants of the device.

`kernel_times` has the formula. Its constants start from a specification sheet, so the prior
predicts without labels. A new device starts from another's constants: the share of the peak that a
kernel reaches is similar, the peaks are not. docs/research/step_time_model.md has the reason for
each term.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from trappm.learner.physics.device_specs import DeviceSpec
from trappm.learner.physics.devices.joint_fit import (
    CALM_STEPS,
    LEAST_GAIN,
    LEAST_NOISE,
    MOST_DAMPING,
    NOISE_DEGREES,
    ROUNDS,
    Distribution,
    Evidence,
    JointFit,
    spread_factor,
    student_loss,
)
from trappm.learner.physics.kernel_terms import Array, Terms, terms_of
from trappm.learner.physics.kernel_times import (
    SHARE_GROUPS,
    Lookup,
    group_rows,
    spreads,
    starting_constants,
    times_of,
)
from trappm.learner.physics.prior import Prior
from trappm.learner.stats.folds import drawn_rows
from trappm.learner.stats.student_t import precisions
from trappm.learner.workload import Workload
from trappm.profiler.errors import InputError

# The form of the fit was chosen on folds of all published rows of step times
# (docs/research/step_time_model.md); `research/priors/step_time.py` judges it. Round numbers.
ITERATIONS = 60
"""Largest number of steps of a fit."""
MOST_CHANGE = 3.0
"""Largest factor of a learned spread against the first."""
MANY_LABELS = 300
"""Number of labels from which spreads are not learned again without a fold: with fewer, errors on
the fold would look too small."""
MOST_LABELS = 1500
"""Largest number of labels for the constants; more only help the residual."""
CHUNK = 500
"""Workloads per block: the derivatives of all kernels take memory."""


class StepTimePrior(Prior):
    """Simulated time of a step in ms."""

    def __init__(
        self,
        spec: DeviceSpec,
        constants: Tensor | None = None,
        learned_spreads: Tensor | None = None,
        known: Distribution | None = None,
        evidence: Sequence[Evidence] = (),
        of_hosts: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Set up the prior; `tensors` stores spec and constants only.

        Args:
            spec: Specification of the device.
            constants: Constants (c; default: those without labels).
            learned_spreads: Spreads of the constants that labels taught (c).
            known: Prior of the constants by other devices.
            evidence: Single kernels of this device.
            of_hosts: Constants by host, where labels came from several; elsewhere `constants`.
        """
        self.spec = spec
        self.constants = starting_constants() if constants is None else constants
        self.learned_spreads = learned_spreads
        self.known = known
        self.evidence = evidence
        self.of_hosts = of_hosts or {}

    @classmethod
    def like_others(
        cls, spec: DeviceSpec, known: Distribution, evidence: Sequence[Evidence] = ()
    ) -> Self:
        """Return the prior of a device without labels: others' constants, moved by its kernels."""
        plain = cls(spec, known.centre, known=known, evidence=evidence)
        return plain.refit([], np.zeros(0)) if evidence else plain

    def started_from(self, other: Self) -> Self:
        """Return this device with the constants of another, relative to its specification."""
        known = None if self.known is None else replace(self.known, centre=other.constants)
        return type(self)(self.spec, other.constants, known=known, evidence=self.evidence)

    @property
    def feature_groups(self) -> tuple[int, ...]:
        return SHARE_GROUPS

    def log_values(self, workloads: Sequence[Workload]) -> Array:
        result = np.zeros(len(workloads))
        for rows, own, constants in self._by_host(workloads):
            result[rows] = _values(_chunks(own, self.spec), constants, self.spec).numpy()
        return result

    def logs_and_features(self, workloads: Sequence[Workload]) -> tuple[Array, Array]:
        logs = np.zeros(len(workloads))
        features = np.zeros((len(workloads), sum(self.feature_groups)))
        for rows, own, constants in self._by_host(workloads):
            with torch.no_grad():
                chunks = [
                    (times.total().log(), times.shares(terms))
                    for terms in _chunks(own, self.spec)
                    for times in [times_of(terms, Lookup(constants), self.spec)]
                ]
            logs[rows], features[rows] = (
                torch.cat(parts).numpy() for parts in zip(*chunks, strict=True)
            )
        return logs, features

    def _by_host(
        self, workloads: Sequence[Workload]
    ) -> Iterator[tuple[list[int], list[Workload], Tensor]]:
        """Yield the workloads of each host: places, workloads and constants."""
        rows: dict[str, list[int]] = {}
        for i, workload in enumerate(workloads):
            rows.setdefault(workload.host if workload.host in self.of_hosts else "", []).append(i)
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
        near: Self | None = None,
    ) -> Self:
        """Return the most probable constants: Student-t errors of the logarithm, Gaussian priors.

        The spread of each group is learned, too; with `MANY_LABELS` it is that of `near`, and other
        devices count no more. Lower bounds (`log_above`) hardly constrain a time and are unused.

        Raises:
            InputError: Workloads and labels differ in number.
        """
        if len(workloads) != len(log_values):
            raise InputError(f"{len(workloads)} workloads and {len(log_values)} labels")
        known = np.flatnonzero(np.isfinite(log_values))
        if self.known is not None and len(known) < MANY_LABELS:
            return self._refit_with_others(self.known, workloads, log_values)
        if not len(known):
            return self
        if len(known) > MOST_LABELS:
            known = known[drawn_rows(len(known), MOST_LABELS)]
        labels = torch.from_numpy(np.asarray(log_values, dtype=np.float64)[known])
        chunks = list(_chunks([workloads[i] for i in known.tolist()], self.spec))
        centre, first = self.constants, spreads(tightness)
        if near is not None and near.learned_spreads is not None and len(known) >= MANY_LABELS:
            learned = near.learned_spreads
            constants, _ = _fit(chunks, labels, centre, learned, self.spec, centre)
            return type(self)(self.spec, constants, learned)
        learned = first
        constants, unsure = _fit(chunks, labels, centre, learned, self.spec, centre)
        for _ in range(ROUNDS - 1):
            learned = _learned_spreads((constants - centre) / learned, unsure, learned, first)
            constants, unsure = _fit(chunks, labels, centre, learned, self.spec, constants)
        return type(self)(self.spec, constants, learned)

    def _refit_with_others(
        self, known: Distribution, workloads: Sequence[Workload], log_values: Array
    ) -> Self:
        """Fit constants to labels of any hosts and single kernels, with a prior by other devices.

        An unknown host has the constants of the one with most labels.
        """
        hosts = np.array([workload.host for workload in workloads], dtype=np.str_)
        names, counts = np.unique(hosts[np.isfinite(log_values)], return_counts=True)
        labelled = Evidence("", "", self.spec, workloads, np.asarray(log_values, dtype=np.float64))
        steps = [
            replace(labelled.at((hosts == host) & np.isfinite(log_values)), host=f"steps {host}")
            for host in names
        ]
        kernels = [replace(part, device="") for part in self.evidence]
        if not steps and not kernels:
            return self
        fit = JointFit([*steps, *kernels], known)
        of_hosts = {host: fit.constants("", f"steps {host}") for host in names.tolist()}
        constants = of_hosts[names[np.argmax(counts)]] if of_hosts else fit.constants("")
        return type(self)(self.spec, constants, None, known, self.evidence, of_hosts)

    def sensitivities(self, workloads: Sequence[Workload]) -> Array:
        if not len(workloads):
            return np.zeros((0, len(self.constants)))
        _, jacobian = _linear(_chunks(workloads, self.spec), self.constants, self.spec)
        values: Array = (jacobian * self._spreads).numpy()
        return values

    @property
    def _spreads(self) -> Tensor:
        """Spread of each constant before labels of this device (c)."""
        if self.known is None:
            return spreads(1.0)
        return (self.known.device**2 + self.known.host**2).sqrt()

    def moved(self, by: Array) -> Self:
        constants = self.constants + torch.from_numpy(by) * self._spreads
        return type(self)(self.spec, constants, known=self.known, evidence=self.evidence)

    def tensors(self) -> dict[str, Tensor]:
        numbers = [0.0 if value is None else value for value in asdict(self.spec).values()]
        spec = torch.tensor(numbers, dtype=torch.float64)
        return {"constants": self.constants.clone(), "spec": spec}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Self:
        constants, spec = tensors["constants"], tensors["spec"].tolist()
        if constants.shape != starting_constants().shape or len(spec) != len(fields(DeviceSpec)):
            raise ValueError(
                f"{tuple(constants.shape)} constants and {len(spec)} numbers of a spec"
            )
        *others, tf32 = spec
        if not constants.isfinite().all() or min(others) <= 0 or not tf32 >= 0:
            raise ValueError("constants that are not finite, or a spec that is not positive")
        half, full, bandwidth, cache, units, launch, dispatch, process, fragments = others
        read = DeviceSpec(
            half, full, bandwidth, cache, round(units),
            launch, dispatch, process, fragments, tf32 or None,
        )  # fmt: skip
        return cls(read, constants.double())


def _chunks(workloads: Sequence[Workload], spec: DeviceSpec) -> Iterator[Terms]:
    """Yield terms of a few workloads at a time, which bounds the memory."""
    for start in range(0, len(workloads), CHUNK):
        yield terms_of(workloads[start : start + CHUNK], spec)


def _values(chunks: Iterable[Terms], constants: Tensor, spec: DeviceSpec) -> Tensor:
    """Return logarithms of the step times (n)."""
    with torch.no_grad():
        times = [times_of(terms, Lookup(constants), spec).total() for terms in chunks]
    return torch.cat(times).log()


def _linear(chunks: Iterable[Terms], constants: Tensor, spec: DeviceSpec) -> tuple[Tensor, Tensor]:
    """Return logarithms of the step times (n) and derivatives by the constants (n, c)."""
    values, jacobians = [], []
    for terms in chunks:
        lookup = Lookup(constants, tracked=True)
        logs = times_of(terms, lookup, spec).total().log()
        jacobians.append(lookup.jacobian(logs))
        values.append(logs.detach())
    return torch.cat(values), torch.cat(jacobians)


def _fit(
    chunks: Sequence[Terms],
    labels: Tensor,
    centre: Tensor,
    spread: Tensor,
    spec: DeviceSpec,
    start: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the most probable constants (c), and their posterior variance in spreads squared (c).

    Damped Gauss-Newton steps on reweighted squares (Student-t errors, scale from the median error).
    The damping follows the ratio of actual and predicted gain (Nielsen 1999, "Damping parameter in
    Marquardt's method"). `scipy.optimize.least_squares` finds the same constants, but decomposes
    labels + constants times constants at each step, which takes several times as long.
    """

    def linear(at: Tensor) -> tuple[Tensor, Tensor]:
        values, jacobian = _linear(chunks, at, spec)
        return labels - values, jacobian * spread

    shift = (start - centre) / spread
    error, jacobian = linear(start)
    scale, damping, growth, calm = 0.5, 0.1, 2.0, 0
    for _ in range(ITERATIONS):
        scale = max(LEAST_NOISE, min(scale, 1.48 * float(error.abs().median())))
        weighted = jacobian * precisions(error**2, scale, NOISE_DEGREES)[:, None]
        curvature = weighted.T @ jacobian
        curvature.diagonal().add_(1.0)
        gradient = weighted.T @ error - shift
        loss = student_loss(error, scale) + float((shift**2).sum())
        gain = -1.0
        while not gain >= 0 and damping < MOST_DAMPING:  # also where it is not a number
            damped = curvature + damping * torch.eye(len(shift), dtype=shift.dtype)
            step = torch.linalg.solve(damped, gradient)
            predicted = float(step @ (damping * step + gradient))
            new_error = labels - _values(chunks, centre + spread * (shift + step), spec)
            gain = loss - student_loss(new_error, scale) - float(((shift + step) ** 2).sum())
            if not gain >= 0:
                damping, growth = damping * growth, growth * 2
        if not gain >= 0:
            break
        trust = gain / max(predicted, 1e-12)
        damping, growth = max(damping * max(1 / 3, 1 - (2 * trust - 1) ** 3), 1e-4), 2.0
        shift = shift + step
        calm = calm + 1 if gain < LEAST_GAIN * len(labels) ** 0.5 else 0
        if calm == CALM_STEPS:
            break
        error, jacobian = linear(centre + spread * shift)
    return centre + spread * shift, torch.linalg.inv(curvature).diagonal()


def _learned_spreads(shift: Tensor, unsure: Tensor, spread: Tensor, first: Tensor) -> Tensor:
    """Return spreads (c), learned from how far labels moved the constants of each group.

    Common constants keep their spread.

    Args:
        shift: Shift of each constant from the center of its prior, in spreads (c).
        unsure: Posterior variance of each constant, in squares of its spread (c).
        spread: Spreads of this fit (c).
        first: Spreads before any label (c).
    """
    learned = first.clone()
    for group, rows in group_rows():
        if group.common:
            continue
        moved = float(((shift * spread / first)[rows] ** 2).sum())
        determined = float((1.0 - unsure[rows]).sum())
        learned[rows] *= spread_factor(moved, determined, 1 / MOST_CHANGE, MOST_CHANGE)
    return learned
