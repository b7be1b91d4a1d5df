"""TraPPM: what a deep-learning training step costs, before it is run.

Examples:
    >>> import trappm
    >>> step_time_ms, memory_mib, power_w = trappm.predict("resnet18", batch_size=4, input_size=96)

Importing this is quick: torch and the rest load when a prediction is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trappm import snapshots
    from trappm.campaigns import Campaign, CampaignResult
    from trappm.extensions.transformers.generation import Generation, generate
    from trappm.label_store import LabelStore
    from trappm.prediction.estimate import Estimate, estimate
    from trappm.prediction.looking_up.answer import Answer
    from trappm.prediction.looking_up.lookup import lookup
    from trappm.prediction.parallel.parallel_prediction import ParallelPrediction
    from trappm.prediction.parallel.shared_step import predict_parallel
    from trappm.prediction.predict import predict
    from trappm.prediction.prediction import Prediction
    from trappm.profiler.errors import TrappmError
    from trappm.profiler.simulation.training_loop import TrainingLoop

    __version__: str

__all__ = [
    "Answer", "Campaign", "CampaignResult", "Estimate", "Generation", "LabelStore",
    "ParallelPrediction", "Prediction", "TrainingLoop", "TrappmError", "__version__", "estimate",
    "generate", "lookup", "predict", "predict_parallel", "snapshots",
]  # fmt: skip

_HOMES = {
    "Campaign": "trappm.campaigns",
    "CampaignResult": "trappm.campaigns",
    "Answer": "trappm.prediction.looking_up.answer",
    "Estimate": "trappm.prediction.estimate",
    "Generation": "trappm.extensions.transformers.generation",
    "LabelStore": "trappm.label_store",
    "ParallelPrediction": "trappm.prediction.parallel.parallel_prediction",
    "Prediction": "trappm.prediction.prediction",
    "TrainingLoop": "trappm.profiler.simulation.training_loop",
    "TrappmError": "trappm.profiler.errors",
    "estimate": "trappm.prediction.estimate",
    "generate": "trappm.extensions.transformers.generation",
    "lookup": "trappm.prediction.looking_up.lookup",
    "predict": "trappm.prediction.predict",
    "predict_parallel": "trappm.prediction.parallel.shared_step",
}


def __dir__() -> list[str]:
    """Return the public names, which `help(trappm)` describes."""
    return [*__all__, "__all__", "__doc__", "__file__", "__name__", "__path__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("trappm")
    if name == "snapshots":
        return import_module("trappm.snapshots")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'trappm' has no attribute {name!r}")
