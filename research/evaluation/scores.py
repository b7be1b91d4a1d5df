"""What runs of a benchmark amount to: errors of each, by family, and over seeds.

Everything here is plain values, ready for JSON.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict

import numpy as np
import numpy.typing as npt

from research.evaluation.benchmark import Rows, Run, Samples, SplitKind
from trappm.learner.estimator import Estimate
from trappm.learner.stats.calibration import LEVELS
from trappm.learner.stats.errors import Accuracy, accuracy
from trappm.profiler.errors import InputError

Array = npt.NDArray[np.float64]


NOMINAL = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Nominal coverage of the central intervals that are checked."""


class Deaths(TypedDict):
    """How well runs that died out of memory are foretold."""

    died: int
    precision: float | None
    recall: float
    capacity: float
    """In MiB: what runs that died needed at least, in the median."""


class Score(TypedDict):
    """Errors of the predictions of some rows."""

    accuracy: Accuracy | None
    """None where no row judges."""
    by_family: dict[str, Accuracy | None]
    without_spikes: NotRequired[Accuracy | None]
    """Where there are spikes."""
    out_of_memory: NotRequired[Deaths]
    """Where runs died."""
    reliability: NotRequired[dict[str, float]]
    """Where the predictor knows a distribution: what intervals of each of `NOMINAL` cover, in
    percent."""


def score(samples: Samples, test: npt.NDArray[np.int64], estimate: Estimate) -> Score:
    """Errors of predictions of the rows `test` of the samples.

    Raises:
        InputError: a prediction is no number: to leave it out would flatter the predictor.
    """
    if missing := int((~np.isfinite(estimate.median)).sum()):
        raise InputError(f"{missing} of {len(test)} predictions are no numbers; mend the predictor")
    judged = samples.judged[test] & ~np.isnan(samples.values[test])
    families = samples.families[test]
    result: Score = {
        "accuracy": _accuracy(samples, test, estimate, judged),
        "by_family": {
            family: _accuracy(samples, test, estimate, judged & (families == family))
            for family in sorted(set(families[judged].tolist()))
        },
    }
    spiked = samples.spiked[test]
    if (judged & spiked).any():
        result["without_spikes"] = _accuracy(samples, test, estimate, judged & ~spiked)
    if estimate.log_quantiles is not None and judged.any():
        logs = np.log(samples.values[test][judged])
        covered = coverages(estimate.log_quantiles[judged], logs)
        names = [f"{100 * nominal:.0f}" for nominal in NOMINAL]
        result["reliability"] = dict(zip(names, (100 * covered).tolist(), strict=True))
    if (memory := out_of_memory(samples, test, estimate, judged)) is not None:
        result["out_of_memory"] = memory
    return result


def _accuracy(
    samples: Samples, test: npt.NDArray[np.int64], estimate: Estimate, rows: Rows
) -> Accuracy | None:
    if not rows.any():
        return None
    low, high, log_quantiles = (
        None if column is None else column[rows]
        for column in (estimate.low, estimate.high, estimate.log_quantiles)
    )
    measured = samples.values[test][rows]
    return accuracy(measured, estimate.median[rows], low, high, log_quantiles)


def out_of_memory(
    samples: Samples, test: npt.NDArray[np.int64], estimate: Estimate, judged: Rows
) -> Deaths | None:
    """How well runs that died out of memory are foretold; None if none died.

    A run is foretold to die if its median is above what those that died needed at least.
    """
    died = ~np.isnan(samples.above[test])
    if not died.any():
        return None
    capacity = float(np.median(samples.above[test][died]))
    foretold = estimate.median > capacity
    right = int((died & foretold).sum())
    warned = int(foretold[died | judged].sum())
    return {
        "died": int(died.sum()),
        "precision": right / warned if warned else None,
        "recall": right / int(died.sum()),
        "capacity": capacity,
    }


def summarize(samples: Samples, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One entry for each estimator, split and number of labels: mean and deviation over seeds.

    Errors of the families are those of all seeds together, as each draws a few of them only.
    """
    groups: dict[tuple[Any, ...], list[Run]] = defaultdict(list)
    for run in runs:
        groups[run.split, run.labels, run.transferred, run.estimator].append(run)
    return [
        {
            "split": str(split),
            "estimator": estimator,
            "labels": labels,
            "transferred": transferred,
            **_over_seeds(samples, members, split),
        }
        for (split, labels, transferred, estimator), members in groups.items()
    ]


def _over_seeds(samples: Samples, runs: Sequence[Run], split: SplitKind) -> dict[str, Any]:
    scores = [score(samples, run.test, run.estimate) for run in runs]
    together = score(samples, *joined(runs))
    # Leaving each family out is one experiment in parts, not one for each seed.
    parts = [together] if split is SplitKind.EACH_FAMILY else scores
    result: dict[str, Any] = {"seeds": [run.seed for run in runs] if parts is scores else []}
    for name in ("accuracy", "without_spikes", "out_of_memory"):
        known: list[Any] = [part.get(name) for part in parts if part.get(name)]
        if known:
            result[name] = _mean(known)
            result[f"{name}_deviation"] = _deviation(known)
    if "reliability" in together:
        result["reliability"] = together["reliability"]
    return result | {"by_family": together["by_family"]}


def joined(runs: Sequence[Run]) -> tuple[npt.NDArray[np.int64], Estimate]:
    """Rows and predictions of several runs, one after the other."""

    def column(name: str) -> Array | None:
        parts = [getattr(run.estimate, name) for run in runs]
        return None if any(part is None for part in parts) else np.concatenate(parts)

    median = np.concatenate([run.estimate.median for run in runs])
    test = np.concatenate([run.test for run in runs])
    return test, Estimate(
        median=median,
        low=column("low"),
        high=column("high"),
        log_quantiles=column("log_quantiles"),
    )


def _mean(parts: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    return {name: _over(parts, name, np.mean) for name in parts[0]}


def _deviation(parts: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Sample deviation; none of one number."""
    if len(parts) < 2:
        return {}
    return {name: _over(parts, name, lambda v: np.std(v, ddof=1)) for name in parts[0]}


def _over(parts: Sequence[dict[str, Any]], name: str, how: Any) -> float | None:
    values = [part[name] for part in parts if part[name] is not None]
    return float(how(values)) if values else None


def coverages(log_quantiles: Array, logs: Array) -> Array:
    """Return the share of n values inside the central interval of each of `NOMINAL` (nominal)."""
    shares = []
    for nominal in NOMINAL:
        low, high = (_quantile(log_quantiles, (1 + sign * nominal) / 2) for sign in (-1, 1))
        shares.append(float(np.mean((low <= logs) & (logs <= high))))
    return np.array(shares)


def _quantile(log_quantiles: Array, level: float) -> Array:
    """Return the quantile of n distributions at a level (n), by linear interpolation."""
    after = min(max(int(np.searchsorted(LEVELS, level)), 1), len(LEVELS) - 1)
    share = (level - LEVELS[after - 1]) / (LEVELS[after] - LEVELS[after - 1])
    between: Array = (1 - share) * log_quantiles[:, after - 1] + share * log_quantiles[:, after]
    return between
