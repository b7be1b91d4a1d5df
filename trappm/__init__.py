"""TraPPM: what a training step takes, without running it.

>>> import trappm
>>> prediction = trappm.predict("resnet50", batch_size=64, device="a100")
>>> prediction.fits, prediction.largest_batch > 64
(True, True)
>>> prediction.memory_mib > 1024 and prediction.step_time_ms > 10
True

Names are loaded when they are first used, because torch takes a second to import.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from trappm.profiler.extensions import extension_modules
from trappm.profiler.models.torchvision_shim import prepare_torchvision

if TYPE_CHECKING:
    from trappm import snapshots
    from trappm.campaigns import Campaign, CampaignResult
    from trappm.label_store import LabelStore
    from trappm.prediction.predict import compare, predict
    from trappm.prediction.prediction import MeasuredStep, Prediction
    from trappm.prediction.selection import DeviceEvidence, devices
    from trappm.profiler.errors import TrappmError
    from trappm.profiler.memory.simulation import TrainingLoop

    __version__: str

__all__ = [
    "Campaign", "CampaignResult", "DeviceEvidence", "LabelStore", "MeasuredStep", "Prediction",
    "TrainingLoop", "TrappmError", "__version__", "compare", "devices", "predict", "snapshots",
]  # fmt: skip

_MODULES = {
    "Campaign": "trappm.campaigns",
    "CampaignResult": "trappm.campaigns",
    "DeviceEvidence": "trappm.prediction.selection",
    "LabelStore": "trappm.label_store",
    "MeasuredStep": "trappm.prediction.prediction",
    "Prediction": "trappm.prediction.prediction",
    "TrainingLoop": "trappm.profiler.memory.simulation",
    "TrappmError": "trappm.profiler.errors",
    "compare": "trappm.prediction.predict",
    "devices": "trappm.prediction.selection",
    "predict": "trappm.prediction.predict",
}

prepare_torchvision()


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("trappm")
    if name == "snapshots":
        return import_module("trappm.snapshots")
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    if not name.startswith("_"):
        for functions in extension_modules("functions"):
            if name in functions.FUNCTIONS:
                return getattr(import_module(functions.FUNCTIONS[name]), name)
    raise AttributeError(f"module 'trappm' has no attribute {name!r}")
