"""Published rows of language models, and how well they are predicted."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

Row = dict[str, str]


def read_rows(path: Path, source: str = "") -> list[Row]:
    """Rows of a sheet, of one source if it is named."""
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if source in row.get("source", "")]


def number(row: Row, name: str) -> float | None:
    """A number of a row; None where the source does not say."""
    return float(row[name]) if row[name] else None


def whole(row: Row, name: str, otherwise: int = 0) -> int:
    value = number(row, name)
    return otherwise if value is None else round(value)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A row with its prediction."""

    group: str
    model: str
    what: str
    measured: float | None
    """None where it ran out of memory."""
    predicted: float
    capacity: float | None = None
    """What the device has of memory; None where time is judged."""
    interval: tuple[float, float] | None = None
    """That an answer has stated, which should hold 90 %."""
    fullest: float | None = None
    """Where another rank than the published one needs the most memory."""

    @property
    def error(self) -> float:
        """Of what was measured."""
        assert self.measured is not None
        return self.predicted / self.measured - 1

    @property
    def predicts_oom(self) -> bool:
        most = self.predicted if self.fullest is None else max(self.fullest, self.predicted)
        return self.capacity is not None and most > self.capacity


HEADING = "                                     rows  models  mean %  median %  within 10 %"


def summary(rows: Sequence[Judged]) -> str:
    """A line a group: errors of what was measured, and how well running out is foreseen."""
    lines = [HEADING]
    for group in dict.fromkeys(row.group for row in rows):
        chosen = [row for row in rows if row.group == group]
        measured = [row for row in chosen if row.measured is not None]
        if measured:
            errors = 100 * np.abs([row.error for row in measured])
            models = len({row.model for row in measured})
            lines.append(
                f"{group:36} {len(measured):5} {models:7} {errors.mean():7.1f} "
                f"{np.median(errors):9.1f} {100 * (errors <= 10).mean():12.0f}"
            )
        stated = [(row.measured, row.interval) for row in measured if row.interval is not None]
        if stated:
            held = np.mean([low <= value <= high for value, (low, high) in stated])
            lines.append(f"{'  within the stated interval':36} {len(stated):5}   {held:.2f}")
        died = [row for row in chosen if row.measured is None]
        if died:
            warned = [row for row in chosen if row.predicts_oom]
            right = sum(row.measured is None for row in warned)
            lines.append(
                f"{'  out of memory':36} {len(died):5}   "
                f"precision {right / max(len(warned), 1):.2f}, "
                f"recall {right / len(died):.2f}"
            )
    return "\n".join(lines)


def details(rows: Iterable[Judged]) -> str:
    """A line a row."""
    return "\n".join(
        f"{row.group[:18]:18} {row.model:16} {row.what:34} "
        f"{'oom' if row.measured is None else f'{row.measured:.4g}':>8} {row.predicted:8.4g}"
        + ("" if row.measured is None else f" {100 * row.error:+6.1f} %")
        for row in rows
    )


T = TypeVar("T")


def held_out(
    rows: Sequence[T], model: Callable[[T], str], fit: Callable[[Sequence[T]], Callable[[T], float]]
) -> list[float]:
    """What is predicted of each row by a fit on the rows of all other models."""
    by_model = {
        name: fit([row for row in rows if model(row) != name])
        for name in dict.fromkeys(map(model, rows))
    }
    return [by_model[model(row)](row) for row in rows]
