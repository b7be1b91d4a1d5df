"""Errors of a campaign's heads on labels that they did not learn from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trappm.cluster.learning.label_arrays import targets_of
from trappm.cluster.scheduler.training_report import Judgement
from trappm.cluster.workers.interfaces import TrainingLabel
from trappm.learner.heads.predictions import DeviceHeads
from trappm.learner.stats.errors import Accuracy, accuracy
from trappm.learner.workload import Workload
from trappm.profiler.records import METRICS

Errors = dict[str, Accuracy]
"""By metric."""


def judged_by(
    heads: DeviceHeads,
    workloads: Sequence[Workload],
    labels: Sequence[TrainingLabel],
    architectures: Sequence[str],
) -> tuple[Errors, list[Judgement]]:
    """Errors by metric, and each prediction beside what was measured.

    Args:
        heads: of the labels' device.
        workloads: those of the labels (n).
        labels: to judge by (n).
        architectures: of the labels (n).
    """
    predictions = heads.predict(workloads)
    targets = targets_of(labels)
    errors: Errors = {}
    judgements = []
    for column, metric in enumerate(predictions.metrics):
        measured = targets[:, list(METRICS).index(metric)]
        known = np.flatnonzero(~np.isnan(measured)).tolist()
        if not known:
            continue
        predicted, low, high = (
            values[:, column] for values in (predictions.median, predictions.low, predictions.high)
        )
        errors[metric] = accuracy(measured, predicted, low, high)
        judgements += [
            Judgement(
                device=labels[i].device,
                configuration_id=labels[i].configuration_id,
                architecture=architectures[i],
                metric=metric,
                measured=float(measured[i]),
                predicted=float(predicted[i]),
                low=float(low[i]),
                high=float(high[i]),
            )
            for i in known
        ]
    return errors, judgements
