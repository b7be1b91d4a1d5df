"""How long a whole training takes on each GPU that SkyPilot considers, for its optimizer.

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
    """What `sky.Task.set_time_estimator` takes: seconds of the training by accelerator name.

    Args:
        model: of timm, or a transformer such as `hf:gpt2`.
        samples: of an epoch.
        epochs: of the training.
        **options: further ones of `trappm.predict`: batch_size, precision, optimizer ...

    Returns:
        A function that raises InputError for resources without a GPU or with several, and
        SnapshotError for a GPU that no head knows.
    """

    def seconds(resources: sky.Resources) -> int:
        cards = dict(resources.accelerators or {})
        if len(cards) != 1 or set(cards.values()) != {1}:
            named = ", ".join(f"{name}:{count:g}" for name, count in cards.items())
            raise InputError(
                f"the resources have {named or 'no accelerator'}; a step is predicted for one GPU, "
                "such as A100:1"
            )
        (card,) = cards
        answer = predict(model, device=card, samples=samples, epochs=epochs, **options)
        if answer.run is None:
            raise InputError(f"the step time of {model} on {card} is not predicted")
        return math.ceil(answer.run.hours * 3600)

    return seconds
