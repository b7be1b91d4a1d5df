"""Parts that a timed step includes; published step times differ in them.

The scope is part of a measurement's environment. Without one, the step is a whole step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from trappm.profiler.errors import InputError

KEY = "step_scope"
"""Key in the environment of a measurement."""
PARTIAL_PROTOCOLS = frozenset(("pycls", "pytorch-gpu-benchmark", "zeus"))
"""Protocols of published labels that are not whole steps; they train, but never answer."""
MAX_BYTES = 1 << 40
"""Upper bound for an image."""


@dataclass(frozen=True, kw_only=True)
class StepScope:
    """Parts of a timed step in addition to forward and backward pass."""

    updates: bool = True
    """True if training includes the optimizer's step."""
    copied_bytes: int = 0
    """Bytes of each image that the step copies from host to device."""
    waits_for_host: bool = True
    """False for sums of kernel times, without kernel launches."""
    loads_data: bool = False
    """True if the step waits for images to be read and decoded."""

    @classmethod
    def of(cls, environment: Mapping[str, Any]) -> Self:
        """Return the scope in a measurement's environment.

        Raises:
            InputError: It has an unknown form.
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
        """Return plain values. They name attempts, so a later field is absent by default."""
        values = asdict(self)
        if not self.loads_data:
            del values["loads_data"]
        return values


WHOLE_STEP = StepScope()

IN_TRAINING = "in-training"
"""Protocol of steps recorded during a user's training.

Other work ran next to them, so they are `imported`, have a stack of their own, and never answer for
a step that was measured alone.
"""
RECORDED = "recorded in training"
"""Source in the environment of such a label."""
