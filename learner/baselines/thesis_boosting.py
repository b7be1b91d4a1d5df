"""The boosted trees of the thesis: features of the model beside features of the device.

K. Panner Selvam's PhD thesis, chapter 6: XGBoost with 2,000 trees of depth 8 over features of the
model and some 20 of the device, one fit over labels of several devices. Its split draws rows, so
configurations of one architecture stand on both sides; the bench tells both splits.

Our choices, where our notes of the thesis are silent: the learning rate and the share of rows are
those that a study found for `tabular.xgboost`; it learns logarithms, as all baselines here; the
model's features are the six static ones and how its step is run; and the device's are those of
`DEVICE_FEATURES`, from `profiler/devices/catalogue.csv`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from trappm.learner.baselines.tabular import Boosting, TabularEstimator, boosting
from trappm.learner.networks.dataset import FloatArray
from trappm.learner.workload import Workload
from trappm.profiler.devices.catalogue import Card, card_of
from trappm.profiler.devices.rank_keys import rank_key
from trappm.profiler.errors import InputError

NAME = "thesis-xgboost"
SETTINGS = Boosting(n_estimators=2000, max_depth=8)

DEVICE_FEATURES: dict[str, Callable[[Card], float | None]] = {
    "half_tflops": lambda card: card.half_tflops,
    "tf32_tflops": lambda card: card.tf32_tflops,
    "fp32_tflops": lambda card: card.fp32_tflops,
    "bandwidth_gbs": lambda card: card.bandwidth_gbs,
    "memory_gb": lambda card: card.memory_gb,
    "cache_mib": lambda card: card.cache_mib,
    "units": lambda card: card.units,
    "power_w": lambda card: card.power_w,
    "capability_major": lambda card: card.capability[0],
    "capability_minor": lambda card: card.capability[1],
    "has_bf16": lambda card: card.has_bf16,
    "on_mezzanine": lambda card: (card.name.form or "").startswith("sxm"),
    "half_flop_per_byte": lambda card: 1e3 * card.half_tflops / card.bandwidth_gbs,
    "tf32_flop_per_byte": lambda card: 1e3 * (card.tf32_tflops or 0) / card.bandwidth_gbs,
    "fp32_flop_per_byte": lambda card: 1e3 * card.fp32_tflops / card.bandwidth_gbs,
    "half_gflops_per_unit": lambda card: 1e3 * card.half_tflops / card.units,
    "fp32_gflops_per_unit": lambda card: 1e3 * card.fp32_tflops / card.units,
    "bandwidth_gbs_per_unit": lambda card: card.bandwidth_gbs / card.units,
    "cache_mib_per_unit": lambda card: card.cache_mib / card.units,
    "memory_gb_per_unit": lambda card: card.memory_gb / card.units,
}
"""Of a card's data sheet; None is what it does not have, or what is not known."""


def listed_card(device: str) -> Card:
    """The card behind a device's key.

    Raises:
        InputError: the catalogue has none.
    """
    card = card_of(rank_key(device).member)
    if card is None:
        raise InputError(
            f"{NAME} learns from a card's data sheet, and none is listed for {device!r}; add a "
            "line to profiler/devices/catalogue.csv"
        )
    return card


def device_features(card: Card) -> FloatArray:
    """Logarithms, log(1 + x), of the card's features (20); 0 where there is none."""
    return np.log1p([float(feature(card) or 0) for feature in DEVICE_FEATURES.values()]).astype(
        np.float32
    )


def thesis_xgboost(
    device_of: Callable[[Workload], Card], settings: Boosting = SETTINGS
) -> TabularEstimator:
    """The chapter's recipe.

    Args:
        device_of: the card that a workload runs on; labels of several may stand in one fit.
        settings: of XGBoost.
    """

    def features(workloads: Sequence[Workload]) -> FloatArray:
        rows = [
            np.concatenate([_model_features(workload), device_features(device_of(workload))])
            for workload in workloads
        ]
        return np.array(rows, dtype=np.float32)

    return TabularEstimator(NAME, boosting(settings), features)


def _model_features(workload: Workload) -> FloatArray:
    """Of the graph, of how its step is run, and of what of it is timed (14)."""
    timed = (workload.scope.updates, workload.scope.copied_bytes)
    features = np.append(workload.static_features, timed).astype(np.float32)
    return np.log1p(features)
