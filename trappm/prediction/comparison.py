"""Comparison of predictions: the fastest, the cheapest, and the surest fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trappm.prediction.costs import prices_of
from trappm.prediction.fitting import Verdict

if TYPE_CHECKING:
    from trappm.prediction.prediction import Prediction

FAR = 20.0
"""A prediction this many times above the largest measurement, or below the smallest, is left out of
comparisons."""


def verdicts(predictions: Sequence[Prediction]) -> dict[str, dict[str, str | None]]:
    """Return the fastest, the cheapest and the best fitting device by model.

    None if fewer than two devices have the figure. A device on which the step does not fit is
    neither the fastest nor the cheapest.
    """

    def least(values: dict[str, float | None], ruled_out: set[str]) -> str | None:
        known = {name: value for name, value in values.items() if value is not None}
        able = [name for name in known if name not in ruled_out]
        return min(able, key=lambda name: known[name]) if able and len(known) > 1 else None

    best: dict[str, dict[str, str | None]] = {}
    for model in dict.fromkeys(prediction.model for prediction in predictions):
        mine = [prediction for prediction in predictions if prediction.model == model]
        full = {p.device for p in mine if p.verdict is Verdict.DOES_NOT_FIT}
        best[model] = {
            "fastest": least({p.device: p.step_time_ms for p in mine}, full),
            "cheapest": least({p.device: cheapest_usd(p) for p in mine}, full),
            "best_fit": least({p.device: p.out_of_memory for p in mine}, set()),
        }
    return best


def comparable(
    predictions: Sequence[Prediction], *, near_labels: bool
) -> tuple[list[Prediction], list[dict[str, str]]]:
    """Return the predictions that can be compared, and a record of each that is left out.

    A prediction without values is left out.

    Args:
        predictions: Predictions of steps.
        near_labels: Leave out, too, what is `FAR` times beyond the measurements of its device,
            unless nothing else is left.
    """
    able = [p for p in predictions if p.memory_mib is not None or p.step_time_ms is not None]
    unable = {p.device: p.missing["memory_mib"] for p in predictions if p not in able}
    left_out = [{"device": device, "reason": reason} for device, reason in unable.items()]
    far = [p for p in able if _is_far(p)]
    if not near_labels or len(far) == len(able):
        return able, left_out
    reason = "far from all measurements of this device"
    left_out += [{"model": p.model, "device": p.device, "reason": reason} for p in far]
    return [p for p in able if p not in far], left_out


def _is_far(prediction: Prediction) -> bool:
    ends = prediction.beyond_labels.items()
    ratios = [getattr(prediction, metric) / end for metric, end in ends]
    return any(ratio > FAR or ratio < 1 / FAR for ratio in ratios)


def best_models(predictions: Sequence[Prediction]) -> dict[str, Prediction]:
    """Return the fastest (per sample) and the cheapest prediction of several models.

    Empty if fewer than two models have the figure. A model that does not fit does not count.
    """
    best = {}
    for what, cost in (
        ("fastest", lambda p: p.samples_per_s and 1 / p.samples_per_s),
        ("cheapest", cheapest_usd),
    ):
        able = [p for p in predictions if p.verdict is not Verdict.DOES_NOT_FIT]
        known = [(value, at) for at, p in enumerate(able) if (value := cost(p)) is not None]
        if len({able[at].model for _, at in known}) > 1:
            best[what] = able[min(known)[1]]
    return best


def cheapest_usd(prediction: Prediction) -> float | None:
    """Return the lowest price of the whole run, or of a million samples without a run."""
    if prediction.run is not None:
        return prediction.run.offers[0].usd if prediction.run.offers else None
    prices = prices_of(prediction.device)
    if prediction.samples_per_s is None or not prices:
        return None
    hours = 1e6 / prediction.samples_per_s / 3600
    return hours * min(price.usd_per_hour for price in prices)
