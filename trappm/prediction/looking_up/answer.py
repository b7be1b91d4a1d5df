"""What `trappm.lookup` answers, also as it is kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from trappm.notebook_cards import card
from trappm.prediction.prediction import Prediction, quantity
from trappm.profiler.number_text import number_text
from trappm.profiler.records import METRICS, Configuration, Provenance
from trappm.store.records import LabelRecord


@dataclass(frozen=True, kw_only=True, repr=False)
class Answer:
    """What one training step costs, and how that is known; iterating gives time, memory, power."""

    model: str
    device: str
    batch_size: int
    source: str
    """`measured`, `imported` or `predicted`."""
    step_time_ms: float | None
    memory_mib: float | None
    memory_above_mib: float | None
    """Memory ran out, and the step needs more than this."""
    power_w: float | None
    labels: tuple[LabelRecord, ...]
    """All labels of this graph, batch size and device; the first one answers."""
    prediction: Prediction | None
    """If there is no label: what a snapshot says."""
    remark: str | None = None
    """What to mind about a label of another name, or what there is instead of one; else None."""

    def __iter__(self) -> Iterator[float | None]:
        return iter((self.step_time_ms, self.memory_mib, self.power_w))

    def __str__(self) -> str:
        """The answer in a sentence."""
        if self.prediction is not None:
            return str(self.prediction)
        if self.memory_above_mib is not None:
            return (
                f"Does not fit {self.device}: a step runs out of memory, it needs more than "
                f"{self.memory_above_mib:,.0f} MiB."
            )
        parts = [quantity(name, value) for name, value, _ in self.figures()]
        if not parts:
            return f"Nothing is known about this step on {self.device}."
        how = f"in {self.labels[0].configuration.precision} at batch {self.batch_size:,}"
        return f"A step on {self.device} takes {', '.join(parts)} {how}."

    def figures(self) -> list[tuple[str, float, str]]:
        """Name, value and unit of each metric that is known."""
        return [
            (name, value, unit)
            for name, unit in METRICS.items()
            if (value := getattr(self, name)) is not None
        ]

    def __repr__(self) -> str:
        return f"<Answer: {self._about}: {self}>"

    def _repr_html_(self) -> str:
        rows = [(name, number_text(value), unit) for name, value, unit in self.figures()]
        return card(f"{self._about}: {self}", rows, filter(None, [self.remark]))

    @property
    def _about(self) -> str:
        of = f"{self.model} on {self.device}, batch {self.batch_size:,}"
        return f"{of}, {self.source}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with the ids of the labels or of the snapshot."""
        labels = [
            {"id": x.id, **x.configuration.to_dict(), "protocol": x.protocol,
             "provenance": x.provenance.value, "step_time_ms": x.step_time_ms,
             "memory_mib": x.memory_mib, "memory_above_mib": x.memory_above_mib,
             "power_w": x.power_w}
            for x in self.labels
        ]  # fmt: skip
        values = {name: getattr(self, name) for name in Answer.__dataclass_fields__}
        prediction = None if self.prediction is None else self.prediction.to_dict()
        snapshot = None if self.prediction is None else self.prediction.snapshot
        label_id = self.labels[0].id if self.labels else None
        return {
            "sentence": str(self),
            **values,
            "label_id": label_id,
            "snapshot": snapshot,
            "labels": labels,
            "prediction": prediction,
        }

    def to_kept(self) -> dict[str, Any]:
        """All of it in plain values, labels whole; `from_kept` is its inverse."""
        values = {name: getattr(self, name) for name in Answer.__dataclass_fields__}
        prediction = self.prediction and self.prediction.to_dict()
        labels = [asdict(label) for label in self.labels]
        return {**values, "labels": labels, "prediction": prediction}

    @classmethod
    def from_kept(cls, values: Mapping[str, Any]) -> Self:
        """Raises KeyError, TypeError, ValueError: it was of none, or of another version's."""
        labels = tuple(
            LabelRecord(
                **{
                    **row,
                    "configuration": Configuration(**row["configuration"]),
                    "provenance": Provenance(row["provenance"]),
                }
            )
            for row in values["labels"]
        )
        prediction = values["prediction"] and Prediction.from_dict(values["prediction"])
        return cls(**{**values, "labels": labels, "prediction": prediction})
