"""Which device is fastest, cheapest, large enough: the same model's predictions side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trappm.prediction.fitting import Verdict

if TYPE_CHECKING:
    from trappm.prediction.prediction import Prediction


def verdicts(predictions: Sequence[Prediction]) -> dict[str, dict[str, str | None]]:
    """By model: the device of the shortest step, of the cheapest run, and of the surest fit.

    None where fewer than two devices tell: nothing is compared then. Where the step does not fit,
    a device is neither fastest nor cheapest.
    """
    best: dict[str, dict[str, str | None]] = {}
    for model in dict.fromkeys(prediction.model for prediction in predictions):
        mine = [prediction for prediction in predictions if prediction.model == model]
        full = {p.device for p in mine if p.verdict is Verdict.DOES_NOT_FIT}
        best[model] = {
            "fastest": _least({p.device: p.step_time_ms for p in mine}, full),
            "cheapest": _least({p.device: cheapest_usd(p) for p in mine}, full),
            "best_fit": _least({p.device: p.out_of_memory for p in mine}, set()),
        }
    return best


FAR = 20.0
"""A prediction this many times above the largest measurement, or below the smallest, is left out of
comparisons."""


def _is_far(prediction: Prediction) -> bool:
    ends = prediction.beyond_labels.items()
    ratios = [getattr(prediction, metric) / end for metric, end in ends]
    return any(ratio > FAR or ratio < 1 / FAR for ratio in ratios)


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
    near = [p for p in able if not _is_far(p)]
    if not near_labels or not near:
        return able, left_out
    reason = "far from all measurements of this device"
    far = [p for p in able if _is_far(p)]
    left_out += [{"model": p.model, "device": p.device, "reason": reason} for p in far]
    return near, left_out


def best_models(predictions: Sequence[Prediction]) -> dict[str, Prediction]:
    """Of several models: the prediction of the shortest time a sample, and of the cheapest run.

    Empty where fewer than two models tell; a model is out where it does not fit.
    """
    able = [p for p in predictions if p.verdict is not Verdict.DOES_NOT_FIT]
    best = {}
    for what, cost in (
        ("fastest", lambda p: p.samples_per_s and 1 / p.samples_per_s),
        ("cheapest", cheapest_usd),
    ):
        known = {id(p): value for p in able if (value := cost(p)) is not None}
        comparable = [p for p in able if id(p) in known]
        if len({p.model for p in comparable}) > 1:
            best[what] = min(comparable, key=lambda p: known[id(p)])
    return best


def cheapest_usd(prediction: Prediction) -> float | None:
    """The lowest price of the whole run, or of a million samples where no run is given."""
    if prediction.run is not None:
        return prediction.run.offers[0].usd if prediction.run.offers else None
    return usd_per_million(prediction)


def usd_per_million(prediction: Prediction) -> float | None:
    """What a million samples cost on the cheapest offer of the device."""
    from trappm.prediction.costs import prices_of

    prices = prices_of(prediction.device)
    if prediction.samples_per_s is None or not prices:
        return None
    hours = 1e6 / prediction.samples_per_s / 3600
    return hours * min(price.usd_per_hour for price in prices)


def _least(values: dict[str, float | None], ruled_out: set[str]) -> str | None:
    """The device of the least value, where two or more have one."""
    known = {name: value for name, value in values.items() if value is not None}
    able = [name for name in known if name not in ruled_out]
    return min(able, key=lambda name: known[name]) if able and len(known) > 1 else None
