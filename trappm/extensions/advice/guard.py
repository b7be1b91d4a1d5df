"""`trappm.check`: whether a step and its run stay within limits, for scripts that launch them.

A limit holds if the upper bound of the 90 % interval is within it, and does not hold if the lower
bound is beyond it. In between the answer is not certain.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trappm.prediction.predict import predict
from trappm.profiler.devices.catalogue import USABLE_SHARE
from trappm.profiler.errors import InputError, TrappmError
from trappm.profiler.records import number_text

if TYPE_CHECKING:
    from torch import nn

    from trappm.prediction.prediction import Prediction

_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?)\s*([kmgt]i?)b\s*", re.IGNORECASE)
_MIB = 1 << 20
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


class Outcome(StrEnum):
    """Outcome of a check of limits."""

    HOLDS = "holds"
    DOES_NOT_HOLD = "does not hold"
    NOT_CERTAIN = "not certain"


EXIT_STATUS = {Outcome.HOLDS: 0, Outcome.DOES_NOT_HOLD: 1, Outcome.NOT_CERTAIN: 3}
"""Exit statuses of `trappm check`; 2 is bad input."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A limit, and the figure that it is for."""

    name: str
    """`memory`, `time` or `cost`."""
    unit: str
    most: float
    value: float | None = None
    low: float | None = None
    high: float | None = None
    reason: str | None = None
    """Why there is no value."""

    @property
    def outcome(self) -> Outcome:
        if self.low is None or self.high is None:
            return Outcome.NOT_CERTAIN
        if self.high <= self.most:
            return Outcome.HOLDS
        return Outcome.DOES_NOT_HOLD if self.low > self.most else Outcome.NOT_CERTAIN

    def __str__(self) -> str:
        """Return such as `time is 41.1 h (36.7 to 47.5), the limit is 12`."""
        if self.value is None:
            return f"{self.name} is not predicted ({self.reason})"
        value, low, high, most = (
            number_text(each, 3) for each in (self.value, self.low or 0, self.high or 0, self.most)
        )
        return f"{self.name} is {value} {self.unit} ({low} to {high}), the limit is {most}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "outcome": self.outcome}


@dataclass(frozen=True, kw_only=True)
class Check:
    """Outcome of a check of several limits."""

    prediction: Prediction
    limits: tuple[Limit, ...]

    @property
    def outcome(self) -> Outcome:
        outcomes = {limit.outcome for limit in self.limits}
        worst = (Outcome.DOES_NOT_HOLD, Outcome.NOT_CERTAIN)
        return next((outcome for outcome in worst if outcome in outcomes), Outcome.HOLDS)

    @property
    def exit_status(self) -> int:
        return EXIT_STATUS[self.outcome]

    def __str__(self) -> str:
        """Return one line, with the limits that decided."""
        deciding = [limit for limit in self.limits if limit.outcome is self.outcome]
        return f"{self.outcome.capitalize()}: {'; '.join(map(str, deciding))}."

    def to_dict(self) -> dict[str, Any]:
        return {
            "sentence": str(self),
            "outcome": self.outcome,
            "exit_status": self.exit_status,
            "limits": [limit.to_dict() for limit in self.limits],
            "prediction": self.prediction.to_dict(),
        }


def check(
    model: str | Path | nn.Module,
    *,
    max_memory: str | None = None,
    max_hours: float | None = None,
    max_cost: float | None = None,
    **question: Any,
) -> Check:
    """Check whether a step and its run stay within limits.

    Args:
        model: Model as `trappm.predict` takes it.
        max_memory: Largest memory with its unit, such as `38GiB` (default: what the GPU can use).
        max_hours: Largest duration of the run; needs `epochs` and `samples`.
        max_cost: Largest price of the run in USD, at the cheapest known offer.
        **question: Other arguments of `trappm.predict`.

    Raises:
        InputError: A limit is wrong or has no run, or the step cannot be predicted at all.
    """
    for name, most in (("max hours", max_hours), ("max cost", max_cost)):
        check_limit_of_run(name, most, question.get("epochs"))
    most_mib = None if max_memory is None else _memory_mib(max_memory)
    try:
        step = predict(model, **question)
    except InputError:
        raise
    except TrappmError as error:  # whose exit status is that of a limit that does not hold
        raise InputError(str(error)) from error
    if most_mib is None and step.capacity_mib is not None:
        most_mib = USABLE_SHARE * step.capacity_mib
    limits = list[Limit]()
    if most_mib is not None:
        memory = None if step.memory is None else [each / 1024 for each in step.memory]
        reason = step.missing.get("memory_mib")
        limits.append(_limit("memory", "GiB", most_mib / 1024, memory, reason))
    reason, run = step.missing.get("run"), step.run
    if max_hours is not None:
        hours = None if run is None else [run.hours, run.low_hours, run.high_hours]
        limits.append(_limit("time", "h", max_hours, hours, reason))
    if max_cost is not None:
        offer = run.offers[0] if run is not None and run.offers else None
        usd = None if offer is None else [offer.usd, offer.low_usd, offer.high_usd]
        unpriced = f"no price is known for {step.device}"
        limits.append(_limit("cost", "USD", max_cost, usd, unpriced if run else reason))
    if not limits:
        raise InputError(f"the memory of {step.device} is unknown; give a limit, such as 4GiB")
    return Check(prediction=step, limits=tuple(limits))


def check_limit_of_run(name: str, most: float | None, epochs: int | None) -> None:
    """Raise InputError if a limit of the run is not above 0, or the question has no run."""
    if most is None:
        return
    if not (isinstance(most, int | float) and most > 0):
        raise InputError(f"{name} is {most!r}; it must be a number above 0")
    if epochs is None:
        raise InputError(
            f"{name} is a limit of a run, whose length is unknown; add epochs and samples"
        )


def _limit(
    name: str, unit: str, most: float, values: Sequence[float] | None, reason: str | None
) -> Limit:
    if values is None:
        return Limit(name=name, unit=unit, most=most, reason=reason)
    value, low, high = values
    return Limit(name=name, unit=unit, most=most, value=value, low=low, high=high)


def _memory_mib(text: str) -> float:
    """Return the MiB of a size such as `38GiB` or `40 GB`; raises InputError for another text."""
    match = _SIZE.fullmatch(str(text))
    if match is None or not float(match[1]):
        raise InputError(f"max memory is {text!r}; give a number and a unit, such as 38GiB")
    unit = match[2].lower()
    base = 1024 if unit.endswith("i") else 1000
    return float(float(match[1]) * base ** _POWERS[unit[0]] / _MIB)
