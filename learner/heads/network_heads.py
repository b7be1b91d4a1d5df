"""Networks of the papers as heads of a device, one per metric, without a physical prior."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from torch import Tensor

from trappm.learner.interface import (
    OTHER_START,
    Array,
    DeviceHeads,
    Predictions,
    Settings,
    Targets,
    Workload,
    join_tensors,
    predictions_of,
    with_prefix,
)
from trappm.learner.paper.estimators import embed_vectors, paper_estimator
from trappm.learner.paper.presets import HeadPreset
from trappm.learner.paper.regressor import HeadNetwork, NetworkModel
from trappm.profiler.errors import InputError
from trappm.profiler.records import METRICS, OnProgress

KIND = "network for each metric"


@dataclass(frozen=True, eq=False)
class NetworkHeads:
    """Trained heads of one device."""

    preset: HeadPreset
    heads: Mapping[str, NetworkModel]
    """Heads by metric with labels, in the order of METRICS."""
    label_count: int

    needs_embeddings = True
    needs_kernels = False

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(self.heads)

    def predict(self, workloads: Sequence[Workload]) -> Predictions:
        """Predict n workloads; raise InputError for missing or wrong embeddings."""
        estimates = [head.predict(workloads) for head in self.heads.values()]
        return predictions_of(self.metrics, estimates, len(workloads))

    def tensors(self) -> dict[str, Tensor]:
        return join_tensors(self.heads)

    def settings(self) -> dict[str, Any]:
        return {"kind": KIND, "metrics": list(self.metrics), "label_count": self.label_count}

    @classmethod
    def from_tensors(
        cls, preset: HeadPreset, settings: Settings, tensors: Mapping[str, Tensor]
    ) -> Self:
        """Read the heads; raise KeyError, ValueError or RuntimeError for other tensors."""
        unknown = set(settings["metrics"]) - set(METRICS)
        if unknown:
            raise ValueError(f"heads for an unknown metric: {', '.join(sorted(unknown))}")
        heads = {
            metric: NetworkModel.from_tensors(
                lambda width, mean_nodes: HeadNetwork(preset, width, mean_nodes),
                embed_vectors,
                preset,
                with_prefix(tensors, f"{metric}."),
            )
            for metric in settings["metrics"]
        }
        return cls(preset, heads, int(settings["label_count"]))


def train_networks(
    workloads: Sequence[Workload],
    targets: Array,
    metrics: Sequence[str],
    groups: Sequence[str],
    preset: HeadPreset,
    generator: np.random.Generator,
    init: DeviceHeads | None,
    on_progress: OnProgress,
) -> NetworkHeads:
    """Train networks on n labels that `learner.heads.physics_heads.train_heads` has checked.

    With `init`, the networks of another device are fine-tuned (TraPPM, Table V).

    Raises:
        InputError: A workload has no embedding, or `init` has another preset or encoder.
    """
    if init is not None and not (isinstance(init, NetworkHeads) and init.preset == preset):
        raise InputError(OTHER_START)
    heads = {}
    for number, metric in enumerate(metrics):
        values = targets[:, list(METRICS).index(metric)]
        estimator = paper_estimator(
            f"head of {metric}",
            preset,
            on_step=lambda done, total, before=number: on_progress(  # type: ignore[misc]
                before * total + done, len(metrics) * total
            ),
        )
        heads[metric] = estimator.fit(
            workloads,
            Targets(values, np.full(len(values), np.nan), groups),
            generator,
            None if init is None else init.heads.get(metric),
        )
    return NetworkHeads(preset, heads, len(workloads))
