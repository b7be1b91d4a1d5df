"""Comparison of predictions: the fastest, the cheapest, and the surest fit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from trappm.prediction.cost import prices_of
from trappm.prediction.fit import Verdict
from trappm.prediction.predict import compare
from trappm.prediction.question import Question
from trappm.prediction.selection import Selection
from trappm.profiler.records import Execution

if TYPE_CHECKING:
    from trappm.prediction.prediction import Prediction

FAR = 20.0
"""A prediction this many times above the largest measurement, or below the smallest, is left out of
comparisons."""

FAR_REASON = "far from all measurements of this device"


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
        full = {_run_on(p) for p in mine if p.verdict is Verdict.DOES_NOT_FIT}
        best[model] = {
            "fastest": least({_run_on(p): p.step_time_ms for p in mine}, full),
            "cheapest": least({_run_on(p): cheapest_usd(p) for p in mine}, full),
            "best_fit": least({_run_on(p): p.out_of_memory for p in mine}, set()),
        }
    return best


def _run_on(prediction: Prediction) -> str:
    """Return the device, and that the step is compiled."""
    is_eager = prediction.execution == Execution.EAGER
    return prediction.device if is_eager else f"{prediction.device} compiled"


class Payoff(NamedTuple):
    """Number of steps after which compiling a model pays on a device."""

    model: str
    device: str
    compile_s: float
    """Seconds of compiling, from the label of the same step."""
    steps: int | None
    """Number of steps after which they are saved; None if compiled steps are no faster."""


def payoffs(predictions: Sequence[Prediction]) -> list[Payoff]:
    """Return when compiling pays, for steps predicted eager and compiled whose label has the time.

    Raises:
        StoreError: The label store cannot be read.
    """
    from trappm.prediction.measured import with_label

    eager_ms = {
        (p.model, p.device): p.step_time_ms for p in predictions if p.execution == Execution.EAGER
    }
    compiled = []
    for p in predictions:
        before_ms = eager_ms.get((p.model, p.device))
        if p.execution == Execution.EAGER or p.step_time_ms is None or before_ms is None:
            continue
        label, saved_ms = with_label(p).measured, before_ms - p.step_time_ms
        if label is not None and label.compile_s is not None:
            steps = math.ceil(1000 * label.compile_s / saved_ms) if saved_ms > 0 else None
            compiled.append(Payoff(p.model, p.device, label.compile_s, steps))
    return compiled


def compare_able(
    models: Sequence[str], devices: Sequence[str] | None = None, **settings: Any
) -> tuple[list[Prediction], list[dict[str, str]]]:
    """Compare steps, and return those that can be compared, with a record of each left out.

    Args:
        models: Names or files.
        devices: Devices by any of their names; None, or "all" among them, for all GPUs.
        **settings: Other arguments of `trappm.compare`, whose errors are raised.
    """
    everywhere = not devices or "all" in devices
    made = compare(models, devices or None, **settings)
    predictions, left_out = comparable(made, near_labels=everywhere)
    if everywhere:
        names = settings.keys() & {"phase", "precision", "snapshot"}
        unable = Selection(Question(**{name: settings[name] for name in names})).unable_devices()
        left_out += [{"device": key, "reason": reason} for key, reason in unable.items()]
    return predictions, left_out


def comparison_json(
    predictions: Sequence[Prediction],
    left_out: Sequence[Mapping[str, str]],
    breakdown_depth: int | None = None,
) -> dict[str, Any]:
    """Return a comparison as JSON values, with what `comparable` left out.

    Args:
        predictions: Predictions that can be compared.
        left_out: Records of the others.
        breakdown_depth: Levels of modules in each memory breakdown; None leaves them out.
    """
    return {
        "predictions": [p.to_dict(breakdown_depth=breakdown_depth) for p in predictions],
        "best": verdicts(predictions),
        "best_of_all": {
            what: {"model": best.model, "device": best.device}
            for what, best in best_models(predictions).items()
        },
        "left_out": list(left_out),
    }


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
    unable = {_run_on(p): p.missing["memory_mib"] for p in predictions if p not in able}
    left_out = [{"device": device, "reason": reason} for device, reason in unable.items()]
    far = [p for p in able if _is_far(p)]
    if not near_labels or len(far) == len(able):
        return able, left_out
    left_out += [{"model": p.model, "device": p.device, "reason": FAR_REASON} for p in far]
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
    prices = prices_of(prediction.device, prediction.usd_per_hour, prediction.card)
    if prediction.samples_per_s is None or not prices:
        return None
    hours = 1e6 / prediction.samples_per_s / 3600
    return hours * min(price.usd_per_hour for price in prices)


def sorted_by_least(predictions: Sequence[Prediction], what: str) -> list[Prediction]:
    """Return the predictions by `cost` or step `time`.

    Steps that do not fit come after those that do, and steps without the figure last.
    """

    def rank(prediction: Prediction) -> tuple[bool, bool, float]:
        figure = cheapest_usd(prediction) if what == "cost" else prediction.step_time_ms
        return figure is None, prediction.verdict is Verdict.DOES_NOT_FIT, figure or 0.0

    return sorted(predictions, key=rank)
