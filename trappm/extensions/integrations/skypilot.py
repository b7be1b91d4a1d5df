"""Training time on each GPU that SkyPilot's optimizer considers.

task.set_time_estimator(time_estimator("resnet50", batch_size=64, samples=1_281_167, epochs=90))
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trappm.prediction.predict import predict
from trappm.profiler.errors import InputError

if TYPE_CHECKING:
    import sky


def time_estimator(
    model: str, *, samples: int, epochs: int, **options: Any
) -> Callable[[sky.Resources], int]:
    """Return an estimator of training time in seconds for `sky.Task.set_time_estimator`.

    Args:
        model: timm name, or a transformer such as `hf:gpt2`.
        samples: Number of training samples per epoch.
        epochs: Number of epochs.
        **options: Other arguments of `trappm.predict`, such as batch_size or precision.

    Returns:
        A function that raises InputError for resources without exactly one GPU, and
        SnapshotError for an unknown GPU.
    """

    def seconds(resources: sky.Resources) -> int:
        cards = dict(resources.accelerators or {})
        if len(cards) != 1 or set(cards.values()) != {1}:
            named = ", ".join(f"{name}:{count:g}" for name, count in cards.items())
            raise InputError(
                f"the resources have {named or 'no accelerator'}; request exactly one GPU, such "
                "as A100:1"
            )
        (card,) = cards
        answer = predict(model, device=card, samples=samples, epochs=epochs, **options)
        if answer.run is None:
            raise InputError(f"the step time of {model} on {card} is not predicted")
        return math.ceil(answer.run.hours * 3600)

    return seconds
