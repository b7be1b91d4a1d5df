"""Fine-tuning of regressors on another device: V100 heads from A100 weights (Table V)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trappm.learner.estimator import Targets
from trappm.learner.paper.regressor import NetworkModel, Regressor, labelled
from trappm.learner.workload import Workload


def fine_tune(
    source: NetworkModel,
    regressor: Regressor,
    workloads: Sequence[Workload],
    targets: Targets,
    generator: np.random.Generator,
) -> NetworkModel:
    """Continue training the networks of a source device on labels of a target device.

    The common factor between the devices needs no training: it shifts the center first. All weights
    are then trained at a smaller learning rate.

    Args:
        source: Networks of the source device.
        regressor: Recipe of the networks, the same as the source's.
        workloads: Workloads on the target device (n).
        targets: Their labels.
        generator: Source of all randomness.
    """
    rows, logs = labelled(workloads, targets)
    of_source = np.log(source.predict([workloads[i] for i in rows]).median)
    level = float(np.median(logs - of_source))
    return regressor.train(
        workloads,
        targets,
        generator,
        replace(source.scales, center=source.scales.center + level),
        source.networks,
        regressor.training.fine_tune_learning_rate,
    )
