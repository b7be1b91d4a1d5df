"""Optuna trials that are pruned before they train, because their step will not fit the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import optuna

from trappm.prediction.fit import Verdict
from trappm.prediction.predict import predict
from trappm.prediction.prediction import Prediction
from trappm.profiler.devices.catalogue import USABLE_SHARE
from trappm.profiler.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

CONSTRAINT = "trappm_memory_mib"
"""Name of the constraint that the trial gets."""


def prune_if_too_large(
    trial: optuna.Trial, model: str | Path | nn.Module, **options: Any
) -> Prediction:
    """Prune a trial whose step does not fit, and set a constraint that samplers learn from.

    The constraint is the predicted memory less what the device can use, in MiB. A trial above zero
    is infeasible. A step that may not fit is not pruned.

    Args:
        trial: Trial that is about to train.
        model: A timm name, a transformer such as `hf:gpt2`, an ONNX file, or a module.
        **options: Other arguments of `trappm.predict`, such as device or batch_size.

    Returns:
        The prediction of a step that fits, or may fit.

    Raises:
        optuna.TrialPruned: The step does not fit; the message is that of the prediction.
        InputError: The memory of the step or of the device is unknown.
    """
    prediction = predict(model, **options)
    if prediction.memory_mib is None or prediction.capacity_mib is None:
        reason = prediction.missing.get("memory_mib", f"{prediction.device} has no known memory")
        raise InputError(f"whether {prediction.model} fits is not predicted: {reason}")
    usable_mib = USABLE_SHARE * prediction.capacity_mib
    trial.set_constraint(CONSTRAINT, prediction.memory_mib - usable_mib)
    if prediction.verdict is Verdict.DOES_NOT_FIT:
        raise optuna.TrialPruned(str(prediction))
    return prediction
