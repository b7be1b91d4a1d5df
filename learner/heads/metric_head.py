"""Our head for one metric on one device: physics, what physics leaves, and how sure that is.

    log value = prior (a formula with few constants) + residual (learned) +- calibrated interval

The prior is fitted on all labels, and once more without each fold of the architectures, so that the
residual and the interval learn from errors on architectures not seen. A head of another device is
a start: its constants are where this device's begin, and what its residual says is believed by the
share that proves right here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trappm.learner.estimator import Estimate, Model, Targets
from trappm.learner.physics.prior import Prior
from trappm.learner.residual.residual import CAUTION, FOLDS, Residual, fit_residual, grouped_folds
from trappm.learner.stats.calibration import Calibration, Familiarity
from trappm.learner.workload import Workload
from trappm.profiler.errors import InputError

Array = npt.NDArray[np.float64]
P = TypeVar("P", bound=Prior)

TRANSFER_TIGHTNESS = 0.15
"""On a new device single constants of the prior move this much less than on an unknown one."""
SHARE_STEP = 0.05
RESIDUAL_DEVIATION = 0.08
"""How far a residual moves the logarithm, for its say among gradients."""


class _Kept(Protocol):
    def tensors(self) -> dict[str, Tensor]: ...


@dataclass(frozen=True, eq=False)
class Head(Generic[P]):
    """A fitted head: what it says is in the metric's unit."""

    prior: P
    residual: Residual
    calibration: Calibration
    familiarity: Familiarity | None
    """None without labels."""
    source: Head[P] | None = None
    """Of another device, where its residual is believed."""
    source_share: float = 0.0

    def predict(self, workloads: Sequence[Workload]) -> Estimate:
        middle, deviation, outside = self._logs(workloads)
        low, high = self.calibration.interval()
        return Estimate(
            median=np.exp(middle),
            low=np.exp(middle + low * deviation),
            high=np.exp(middle + high * deviation),
            log_std=deviation,
            log_std_of_mean=np.sqrt(np.maximum(deviation**2 - self.residual.noise**2, 0.0)),
            outside=outside,
        )

    def exceeding(self, workloads: Sequence[Workload], limit: float) -> Array:
        """The probability that each of n workloads has a value above this limit (n).

        Of memory and a device's capacity: the probability of running out of memory.
        """
        middle, deviation, _ = self._logs(workloads)
        return self.calibration.exceeding((np.log(limit) - middle) / deviation)

    def gradients(self, workloads: Sequence[Workload]) -> npt.NDArray[np.float32]:
        """Of the predicted logarithm by the prior's constants, as they are by now, in units of how
        uncertain each is without labels, and by weights on the residual's features (n, g)."""
        features = self.prior.features(workloads)
        deviation = np.repeat(np.sqrt(self.prior.feature_groups), self.prior.feature_groups)
        deviation = deviation * np.maximum(features.std(axis=0), 1e-9)
        scaled = RESIDUAL_DEVIATION * (features - features.mean(axis=0)) / deviation
        return np.hstack([self.prior.sensitivities(workloads), scaled]).astype(np.float32)

    def learned(self, workloads: Sequence[Workload]) -> Array:
        """What is added to the prior's logarithm (n)."""
        return self._learned(workloads, self.prior.features(workloads))[0]

    def _logs(
        self, workloads: Sequence[Workload]
    ) -> tuple[Array, Array, npt.NDArray[np.bool_] | None]:
        """Logarithm of each value (n), its deviation (n), and which are unlike all labels (n)."""
        features = self.prior.features(workloads)
        added, deviation = self._learned(workloads, features)
        middle = self.prior.log_values(workloads) + added
        if self.familiarity is None:
            return middle, deviation, None
        distance = self.familiarity.distance(features)
        widened = self.familiarity.widened(deviation, distance)
        return middle, widened, self.familiarity.outside(distance)

    def _learned(self, workloads: Sequence[Workload], features: Array) -> tuple[Array, Array]:
        added, deviation = self.residual.predict(features)
        if self.source is not None:
            added = added + self.source_share * self.source.learned(workloads)
        return added, deviation

    def tensors(self) -> dict[str, Tensor]:
        """All that a snapshot keeps of it."""
        parts: dict[str, _Kept] = {
            "prior": self.prior,
            "residual": self.residual,
            "calibration": self.calibration,
        }
        if self.familiarity is not None:
            parts["familiarity"] = self.familiarity
        if self.source is not None:
            parts["source"] = self.source
        found = {f"{part}.{k}": v for part, x in parts.items() for k, v in x.tensors().items()}
        return {**found, "source_share": torch.tensor(self.source_share, dtype=torch.float64)}

    @classmethod
    def from_tensors(cls, prior: type[P], tensors: Mapping[str, Tensor]) -> Self:
        """Raises KeyError or ValueError for tensors that are not those of such a head."""

        def within(part: str) -> dict[str, Tensor]:
            start = f"{part}."
            return {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}

        familiarity, source = within("familiarity"), within("source")
        return cls(
            prior.from_tensors(within("prior")),
            Residual.from_tensors(within("residual")),
            Calibration.from_tensors(within("calibration")),
            Familiarity.from_tensors(familiarity) if familiarity else None,
            cls.from_tensors(prior, source) if source else None,
            float(tensors["source_share"]),
        )


class Ours:
    """Our estimator: fits heads over one kind of prior."""

    def __init__(self, prior: Prior, name: str = "ours") -> None:
        """With the prior as it is known without labels."""
        self.prior, self.name = prior, name

    def fit(
        self,
        workloads: Sequence[Workload],
        targets: Targets,
        generator: np.random.Generator,
        start: Model | None = None,
    ) -> Head[Prior]:
        """Fits a head; no label at all is enough, where prior or start say something.

        Raises:
            InputError: shapes that differ, values that are not positive, or a start of another
                kind.
        """
        _check(workloads, targets)
        if start is not None and not isinstance(start, Head):
            raise InputError(f"a {type(start).__name__} is no head to start from")
        centre = self.prior if start is None else self.prior.started_from(start.prior)
        tightness = 1.0 if start is None else TRANSFER_TIGHTNESS
        n = len(workloads)
        log_values, log_above = np.log(targets.values), np.log(targets.above)

        def refitted(rows: npt.NDArray[np.bool_], near: Prior | None = None) -> Prior:
            return centre.refit(
                [w for w, chosen in zip(workloads, rows, strict=True) if chosen],
                log_values[rows],
                log_above=log_above[rows],
                tightness=tightness,
                near=near,
            )

        prior = refitted(np.ones(n, dtype=bool))
        folds = grouped_folds(targets.groups, FOLDS, generator) if n else np.zeros(0, np.int64)
        said = np.zeros(n)
        for fold in np.unique(folds):
            out = folds == fold
            unseen = [w for w, chosen in zip(workloads, out, strict=True) if chosen]
            said[out] = refitted(~out, prior).log_values(unseen)
        # Of a run that died only a bound is known (`least`), and `left` is NaN.
        left, least = log_values - said, log_above - said
        known = ~np.isnan(left)
        source, share = None, 0.0
        if start is not None:
            word = start.learned(workloads)
            share = _share(left[known], word[known])
            source = start if share else None
            left, least = left - share * word, least - share * word
        features = prior.features(workloads)
        residual, unseen_words = fit_residual(
            features,
            left,
            targets.groups,
            generator,
            feature_groups=prior.feature_groups,
            folds=folds,
            least=least,
        )
        errors = np.where(known, left, least) - unseen_words.mean
        familiarity, deviations = None, unseen_words.deviation
        if n:
            familiarity = Familiarity.fit(features, targets.groups)
            familiarity, deviations = familiarity.learned(
                errors, deviations, folds, targets.groups, known
            )
        calibration = Calibration.fit(errors, deviations, targets.groups, known)
        return Head(prior, residual, calibration, familiarity, source, share)


def _share(left: Array, word: Array) -> float:
    """How much of the source's word to take: the least absolute error, from all of it at first."""
    shares = np.arange(0.0, 1.0 + SHARE_STEP / 2, SHARE_STEP)
    caution = CAUTION * float(np.abs(word).mean()) if len(word) else 1.0
    losses = [np.abs(left - s * word).sum() + caution * (1.0 - s) for s in shares]
    return float(shares[int(np.argmin(losses))])


def _check(workloads: Sequence[Workload], targets: Targets) -> None:
    n = len(workloads)
    shapes = (targets.values.shape, targets.above.shape, (len(targets.groups),))
    if shapes != ((n,), (n,), (n,)):
        raise InputError(f"values, bounds and groups have shapes {shapes}; all must be ({n},)")
    numbers = np.where(np.isnan(targets.values), targets.above, targets.values)
    if not (np.isfinite(numbers).all() and np.all(numbers > 0)):
        raise InputError("a label is missing, zero, negative or infinite")
