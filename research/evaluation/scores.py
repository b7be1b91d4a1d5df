"""Errors of runs of a benchmark: of each run, by family, and over seeds, as plain values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from research.evaluation.benchmark import Rows, Run, Samples, SplitKind
from trappm.learner.estimator import Estimate
from trappm.learner.stats.calibration import LEVELS
from trappm.learner.stats.errors import Accuracy, accuracy
from trappm.profiler.errors import InputError

Array = npt.NDArray[np.float64]

NOMINAL = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Nominal coverage of the central intervals that are checked."""

Score = dict[str, Any]
"""Errors of the predictions of some rows: `accuracy` (None where no row is judged), `by_family`;
where there are spikes, `without_spikes`; where runs ran out of memory, `out_of_memory`; where the
predictor knows a distribution, `reliability`: coverage of intervals of each NOMINAL in percent."""


def score(samples: Samples, test: npt.NDArray[np.int64], estimate: Estimate) -> Score:
    """Return the errors of predictions of the rows `test` of the samples.

    Raises:
        InputError: A prediction is NaN: leaving it out would flatter the predictor.
    """
    if missing := int((~np.isfinite(estimate.median)).sum()):
        raise InputError(f"{missing} of {len(test)} predictions are NaN; fix the predictor")
    measured, families = samples.values[test], samples.families[test]
    judged = samples.judged[test] & ~np.isnan(measured)

    def accuracy_of(rows: Rows) -> Accuracy | None:
        columns = (estimate.low, estimate.high, estimate.log_quantiles)
        low, high, quantiles = (None if column is None else column[rows] for column in columns)
        if not rows.any():
            return None
        return accuracy(measured[rows], estimate.median[rows], low, high, quantiles)

    result: Score = {
        "accuracy": accuracy_of(judged),
        "by_family": {
            family: accuracy_of(judged & (families == family))
            for family in sorted(set(families[judged].tolist()))
        },
    }
    spiked = samples.spiked[test]
    if (judged & spiked).any():
        result["without_spikes"] = accuracy_of(judged & ~spiked)
    if estimate.log_quantiles is not None and judged.any():
        covered = coverages(estimate.log_quantiles[judged], np.log(measured[judged]))
        names = [f"{100 * nominal:.0f}" for nominal in NOMINAL]
        result["reliability"] = dict(zip(names, (100 * covered).tolist(), strict=True))
    died = ~np.isnan(samples.above[test])
    if died.any():
        # A run is predicted to run out if its median is above the least that such runs needed.
        capacity = float(np.median(samples.above[test][died]))
        predicted = estimate.median > capacity
        right, warned = int((died & predicted).sum()), int(predicted[died | judged].sum())
        result["out_of_memory"] = {
            "died": int(died.sum()),
            "precision": right / warned if warned else None,
            "recall": right / int(died.sum()),
            "capacity": capacity,
        }
    return result


def summarize(samples: Samples, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return mean and deviation over seeds by estimator, split and number of labels.

    Errors of the families are those of all seeds together, as each draws only a few of them.
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
    together = score(samples, *joined(runs))
    # Leaving each family out is one experiment in parts, not one for each seed.
    is_one = split is SplitKind.EACH_FAMILY
    parts = [together] if is_one else [score(samples, run.test, run.estimate) for run in runs]
    result: dict[str, Any] = {"seeds": [] if is_one else [run.seed for run in runs]}
    for name in ("accuracy", "without_spikes", "out_of_memory"):
        known = pd.DataFrame([part[name] for part in parts if part.get(name)], dtype=float)
        if len(known):
            result[name] = _plain(known.mean())
            result[f"{name}_deviation"] = _plain(known.std()) if len(known) > 1 else {}
    if "reliability" in together:
        result["reliability"] = together["reliability"]
    return result | {"by_family": together["by_family"]}


def _plain(values: pd.Series) -> dict[str, float | None]:
    return {str(name): None if np.isnan(v) else float(v) for name, v in values.items()}


def joined(runs: Sequence[Run]) -> tuple[npt.NDArray[np.int64], Estimate]:
    """Return rows and predictions of several runs, one after the other."""

    def column(name: str) -> npt.NDArray[np.float64] | None:
        parts = [getattr(run.estimate, name) for run in runs]
        return None if any(part is None for part in parts) else np.concatenate(parts)

    test = np.concatenate([run.test for run in runs])
    return test, Estimate(
        median=np.concatenate([run.estimate.median for run in runs]),
        low=column("low"),
        high=column("high"),
        log_quantiles=column("log_quantiles"),
    )


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
