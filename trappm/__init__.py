"""TraPPM: what a deep-learning training step costs, before it is run.

>>> import trappm
>>> step_time_ms, memory_mib, power_w = trappm.predict("resnet18", batch_size=4, input_size=96)

Importing this is quick: torch and the rest load when a prediction is asked for.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trappm.prediction import Prediction, predict

__version__ = version("trappm")

__all__ = ["Prediction", "__version__", "predict"]


def __getattr__(name: str) -> Any:
    if name in {"Prediction", "predict"}:
        from trappm import prediction

        return getattr(prediction, name)
    raise AttributeError(f"module 'trappm' has no attribute {name!r}")
