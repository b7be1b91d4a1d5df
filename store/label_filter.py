"""A selection of labels and attempts.

The text in the annotation of a field says what it selects; it is also the help of the option of
`trappm labels query` and `export`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Annotated, NamedTuple

from trappm.profiler.errors import InputError
from trappm.profiler.records import (
    METRICS,
    OPTIMIZER_NAMES,
    PRECISION_NAMES,
    Execution,
    MemoryFormat,
    Optimizer,
    Outcome,
    Phase,
    Precision,
    Provenance,
)

_AGE = re.compile(r"([0-9]{1,6})([mhdw])")
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def point_in_time(text: str, *, end_of_day: bool = False) -> str:
    """Return a point in time in UTC, in ISO 8601.

    Args:
        text: ISO 8601 date or time (UTC without a zone), or an age such as `7d` (m, h, d, w).
        end_of_day: Whether a date means its end instead of its beginning.

    Raises:
        InputError: It is neither.
    """
    age = _AGE.fullmatch(text)
    try:
        if age:
            return (datetime.now(UTC) - timedelta(**{_UNITS[age[2]]: int(age[1])})).isoformat()
        if re.fullmatch(r"[0-9-]{8,10}", text):
            day = time.max if end_of_day else time.min
            return datetime.combine(date.fromisoformat(text), day, UTC).isoformat()
        moment = datetime.fromisoformat(text)
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
        return moment.astimezone(UTC).isoformat()
    except (ValueError, OverflowError) as error:
        raise InputError(
            f"{text!r} is no time; give an ISO date such as 2026-11-21, or an age such as 7d"
        ) from error


MAX_WHERE = 1000
"""Largest number of characters of a condition."""
_ONE = r"""(\w+)\s*(<=|>=|!=|==|=|<|>)\s*("[^"]*"|'[^']*'|[^\s"'<>=!]+)"""
_COMPARISON = re.compile(_ONE)
_WHERE = re.compile(rf"\s*{_ONE}(?:\s+and\s+{_ONE})*\s*", re.IGNORECASE)


class Comparison(NamedTuple):
    """A comparison of one column with a value."""

    column: str
    operator: str
    value: str


def comparisons(where: str) -> list[Comparison]:
    """Return the comparisons of a condition; all of them must hold.

    >>> comparisons("step_time_ms > 100 and device = a100")[1]
    Comparison(column='device', operator='=', value='a100')

    Raises:
        InputError: It is too long, or not made of comparisons.
    """
    if len(where) > MAX_WHERE or not _WHERE.fullmatch(where):
        raise InputError(
            f"where is {where[:100]!r}; write comparisons (=, !=, <, <=, >, >=) joined by 'and', "
            "such as 'step_time_ms > 100 and device = a100'"
        )
    return [
        Comparison(column, operator, value[1:-1] if value[0] in "\"'" else value)
        for column, operator, value in _COMPARISON.findall(where)
    ]


MAX_INTEGER = 2**31 - 1
"""Largest value that an integer column holds on every back end."""

ANY_OUTCOME = "any"
"""Outcome in a filter that selects all attempts."""


@dataclass(frozen=True, kw_only=True)
class LabelFilter:
    """A selection of labels or attempts; a field that is None does not restrict.

    >>> LabelFilter(family="resnet", device="a100", since="7d").family
    'resnet'

    Raises:
        InputError: A setting, metric, outcome or provenance is unknown, a size is out of range, or
            a time or a condition is invalid.
    """

    architecture: Annotated[str | None, "An architecture, or a glob such as 'resnet*'."] = None
    family: Annotated[str | None, "Family of architectures, such as resnet."] = None
    device: Annotated[str | None, "Device key, such as cpu-2t."] = None
    batch_size: Annotated[int | None, "Samples per step."] = None
    input_size: Annotated[int | None, "Pixels, or tokens of hf: names."] = None
    precision: Annotated[str | None, f"{PRECISION_NAMES}."] = None
    memory_format: Annotated[str | None, "contiguous or channels-last."] = None
    optimizer: Annotated[str | None, f"{OPTIMIZER_NAMES}."] = None
    phase: Annotated[str | None, "train or infer."] = None
    execution: Annotated[str | None, "eager or compile."] = None
    protocol: Annotated[str | None, "Measuring protocol, such as paper."] = None
    metric: Annotated[str | None, "Only labels with this metric, such as power_w."] = None
    outcome: Annotated[
        str | None, "Attempts with this outcome (oom, timeout, ... or any) instead of labels."
    ] = None
    provenance: Annotated[str | None, "measured, imported or simulated."] = None
    campaign: Annotated[str | None, "Campaign id, or its beginning."] = None
    since: Annotated[
        str | None, "Earliest date (2026-11-21) or time, in UTC, or an age (30m, 12h, 7d, 2w)."
    ] = None
    until: Annotated[str | None, "Latest date, inclusive, time or age, as for since."] = None
    where: Annotated[
        str | None, "Comparisons of columns, such as 'step_time_ms > 100 and batch_size = 8'."
    ] = None

    def __post_init__(self) -> None:
        choices: dict[str, Sequence[str]] = {
            "precision": list(Precision),
            "memory_format": list(MemoryFormat),
            "optimizer": list(Optimizer),
            "phase": list(Phase),
            "execution": list(Execution),
            "metric": [*METRICS, "energy_j"],
            "outcome": [*Outcome, ANY_OUTCOME],
            "provenance": list(Provenance),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value is not None:
                _check_choice(name, value, allowed)
        for name in ("batch_size", "input_size"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= MAX_INTEGER:
                raise InputError(f"{name} is {value}; it must be from 1 to {MAX_INTEGER:,}")
        for text in (self.since, self.until):
            if text is not None:
                point_in_time(text)
        if self.where is not None:
            columns = {**choices, "outcome": list(Outcome)}
            for name, _, value in comparisons(self.where):
                if name in columns and name != "metric":  # which is no column
                    _check_choice(name, value, columns[name])


def _check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise InputError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
