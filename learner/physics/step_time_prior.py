"""Physical prior of step times: kernels one by one, with constants of the device.

`kernel_times` has the formula. Its constants start from a specification sheet, so the prior
predicts without labels. A new device starts from another's constants: the share of the peak that a
kernel reaches is similar, the peaks are not. docs/research/step_time.md has the reason for
each term.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import Tensor

from trappm.learner.physics.device_specs import DeviceSpec
from trappm.learner.physics.kernel_times import (
    SHARE_GROUPS,
    Lookup,
    chunks_of,
    linear,
    log_times,
    spreads,
    starting_constants,
    times_of,
)
from trappm.learner.physics.prior import Prior
from trappm.learner.stats.folds import drawn_rows
from trappm.learner.workload import Array, Workload

if TYPE_CHECKING:
    from trappm.learner.physics.devices.joint_fit import Distribution, Evidence

# The form of the fit was chosen on folds of all published rows of step times
# (docs/research/step_time.md). Round numbers.
MANY_LABELS = 300
"""Number of labels from which spreads are not learned again without a fold: with fewer, errors on
the fold would look too small."""
MOST_LABELS = 1500
"""Largest number of labels for the constants; more only help the residual."""


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
            result[rows] = log_times(chunks_of(own, self.spec), constants, self.spec).numpy()
        return result

    def logs_and_features(self, workloads: Sequence[Workload]) -> tuple[Array, Array]:
        logs = np.zeros(len(workloads))
        features = np.zeros((len(workloads), sum(self.feature_groups)))
        for rows, own, constants in self._by_host(workloads):
            with torch.no_grad():
                chunks = [
                    (times.total().log(), times.shares(terms))
                    for terms in chunks_of(own, self.spec)
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
        """
        from trappm.learner.physics.devices.joint_fit import Distribution, Evidence, JointFit

        known = np.flatnonzero(np.isfinite(log_values))
        if self.known is not None and len(known) < MANY_LABELS:
            return self._refit_with_others(self.known, workloads, log_values)
        if not len(known):
            return self
        if len(known) > MOST_LABELS:
            known = known[drawn_rows(len(known), MOST_LABELS)]
        labels = np.asarray(log_values, dtype=np.float64)[known]
        labelled = Evidence("", "", self.spec, [workloads[i] for i in known.tolist()], labels)
        learned = near.learned_spreads if near is not None and len(known) >= MANY_LABELS else None
        spread = spreads(tightness) if learned is None else learned
        prior = Distribution.of_one(self.constants, spread)
        fit = JointFit([labelled], prior, learns=learned is None)
        return type(self)(self.spec, fit.constants(""), fit.distribution.device)

    def _refit_with_others(
        self, known: Distribution, workloads: Sequence[Workload], log_values: Array
    ) -> Self:
        """Fit constants to labels of any hosts and single kernels, with a prior by other devices.

        An unknown host has the constants of the one with most labels.
        """
        from trappm.learner.physics.devices.joint_fit import Evidence, JointFit

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

    def pass_share(self, workloads: Sequence[Workload]) -> Array:
        """Return the share of a training step that its forward and backward pass take (n).

        What a step waits for once is not repeated, either.
        """
        with torch.no_grad():
            shares = [
                times_of(terms, Lookup(self.constants), self.spec).pass_share()
                for terms in chunks_of(workloads, self.spec)
            ]
        values: Array = torch.cat(shares).numpy()
        return values

    def sensitivities(self, workloads: Sequence[Workload]) -> Array:
        if not len(workloads):
            return np.zeros((0, len(self.constants)))
        _, jacobian = linear(chunks_of(workloads, self.spec), self.constants, self.spec)
        values: Array = (jacobian * self._spreads).numpy()
        return values

    @property
    def _spreads(self) -> Tensor:
        """Spread of each constant before labels of this device (c)."""
        if self.known is None:
            return spreads(1.0)
        return (self.known.device**2 + self.known.host**2).sqrt()

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
        read = DeviceSpec(*others)
        read = replace(read, units=round(read.units), tf32_tflops=tf32 or None)
        return cls(read, constants.double())
