"""What is inside a timed step: those who publish step times do not all time the same.

A property of the labels' source, so that what a source leaves out goes into no constant of a
device. It stands in a measurement's environment; where nothing stands, the step is a whole one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from trappm.profiler.errors import InputError

KEY = "step_scope"
"""In the environment of a measurement."""
PARTIAL_PROTOCOLS = frozenset(("pycls", "pytorch-gpu-benchmark", "zeus"))
"""Of published labels that are not of whole steps, or of more (Zeus's loader, under power limits):
something to learn from, and nobody's cost."""
MAX_BYTES = 1 << 40
"""Of an image: a round number above any."""


@dataclass(frozen=True, kw_only=True)
class StepScope:
    """What is timed beside forward and backward pass."""

    updates: bool = True
    """The optimizer's step, in training."""
    copied_bytes: int = 0
    """Of each image, copied from the host's memory to the device within the step."""
    waits_for_host: bool = True
    """False for kernels alone: nothing is launched within that the device could wait for."""
    loads_data: bool = False
    """The step waits for images that are read and decoded; how long, nothing tells."""

    @classmethod
    def of(cls, environment: Mapping[str, Any]) -> Self:
        """The scope of a measurement with this environment.

        Raises:
            InputError: it is of a form that nobody writes.
        """
        given = environment.get(KEY, {})
        known = {name: type(value) for name, value in asdict(cls()).items()}
        if not isinstance(given, Mapping) or not all(
            type(value) is known.get(name) and 0 <= int(value) <= MAX_BYTES
            for name, value in given.items()
        ):
            raise InputError(
                f"{KEY} of an environment is {str(given)[:80]!r}; it may have "
                f"{', '.join(f'{name} ({kind.__name__})' for name, kind in known.items())}"
            )
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """Plain values. They name attempts, so what came later stands there where it says more."""
        values = asdict(self)
        if not self.loads_data:
            del values["loads_data"]
        return values


WHOLE_STEP = StepScope()

IN_TRAINING = "in-training"
"""The protocol of steps that somebody's training took: recorded beside its other work, on a machine
that nobody kept quiet. Such a label is `imported`, under a stack of its own, and never answers for
one that was measured alone."""
RECORDED = "recorded in training"
"""The source that the environment of such a label names."""
