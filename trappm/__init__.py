"""TraPPM predicts what a deep-learning training step takes, before it runs.

Examples:
    >>> import trappm
    >>> prediction = trappm.predict("resnet18", batch_size=4, device="v100")
    >>> prediction.step_time_ms, prediction.memory_mib, prediction.fits, prediction.largest_batch

The import is quick: torch and the rest load with the first prediction.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trappm import snapshots
    from trappm.label_frames import labels
    from trappm.prediction.device_names import DeviceEvidence, devices
    from trappm.prediction.measured import MeasuredStep
    from trappm.prediction.predict import compare, predict
    from trappm.prediction.prediction import Prediction
    from trappm.profiler.errors import TrappmError
    from trappm.profiler.simulation.training_loop import TrainingLoop

    __version__: str

__all__ = [
    "DeviceEvidence", "MeasuredStep", "Prediction", "TrainingLoop", "TrappmError", "__version__",
    "compare", "devices", "labels", "predict", "snapshots",
]  # fmt: skip

_MODULES = {
    "DeviceEvidence": "trappm.prediction.device_names",
    "MeasuredStep": "trappm.prediction.measured",
    "Prediction": "trappm.prediction.prediction",
    "TrainingLoop": "trappm.profiler.simulation.training_loop",
    "TrappmError": "trappm.profiler.errors",
    "compare": "trappm.prediction.predict",
    "devices": "trappm.prediction.device_names",
    "labels": "trappm.label_frames",
    "predict": "trappm.prediction.predict",
}
_RENAMED = {
    "Answer": "trappm.Prediction (its field `measured`)",
    "Estimate": "trappm.Prediction (its property `memory_breakdown`)",
    "estimate": "trappm.predict(...).memory_breakdown",
    "fits": "trappm.predict(...).fits",
    "generate": "trappm.extensions.transformers.generate",
    "lookup": "trappm.predict(..., labels=True).measured",
    "predict_parallel": "trappm.extensions.parallel.predict_parallel",
}
"""Earlier names, and what replaces them."""


def __dir__() -> list[str]:
    """Return the public names, which `help(trappm)` describes."""
    return [*__all__, "__all__", "__doc__", "__file__", "__name__", "__path__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("trappm")
    if name == "snapshots":
        return import_module("trappm.snapshots")
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    if name in _RENAMED:
        raise AttributeError(f"trappm.{name} has moved; use {_RENAMED[name]}")
    raise AttributeError(f"module 'trappm' has no attribute {name!r}")
