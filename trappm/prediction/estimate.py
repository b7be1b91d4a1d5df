"""Adapter for integrations and the server, which still call `estimate`; they move to `predict`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trappm.prediction.device_names import (
    DEFAULT_DEVICE,
    precision_gap,
    refuse_precision,
)
from trappm.prediction.fitting import (
    MemoryInterval,
    Verdict,
    beside_step_mib,
    capacity_of,
    largest_batch,
    simulated_interval,
)
from trappm.prediction.models.sizes import size_of
from trappm.prediction.predict import predict
from trappm.prediction.question import Question
from trappm.prediction.simulated_step import ModelCall, SimulatedStep, example_inputs, loop_of
from trappm.profiler.errors import SnapshotError, UnsupportedModelError
from trappm.profiler.records import MemoryFormat, Phase, Precision, member
from trappm.profiler.simulation.memory_breakdown import MemoryBreakdown
from trappm.profiler.simulation.step_trace import StepTrace

if TYPE_CHECKING:
    from trappm.prediction.models.tracing import Deadline, TracingProcess

__all__ = ["Estimate", "EstimateRequest", "Predicted", "estimate", "loop_of"]


def estimate(
    model: Any,
    *inputs: Any,
    batch_size: int | None = None,
    targets: Any = None,
    loss: Callable[..., Any] | None = None,
    optimizer: Any = "sgd",
    precision: str = Precision.FP32,
    memory_format: str = MemoryFormat.CONTIGUOUS,
    phase: str = Phase.TRAIN,
    input_size: int | None = None,
    sequence_length: int | None = None,
    snapshot: str | None = None,
    **keywords: Any,
) -> Estimate:
    """Return the simulated memory of a step."""
    arithmetic = member("precision", Precision, precision)
    loop = loop_of(optimizer, arithmetic)
    question = Question(
        batch_size=batch_size, phase=phase, precision=arithmetic, memory_format=memory_format,
        optimizer=loop.optimizer, snapshot=snapshot,
    )  # fmt: skip
    input_size = size_of(model, input_size, sequence_length)
    is_named = isinstance(model, str | Path)
    called = None if is_named else example_inputs(model, inputs, keywords, targets)
    call = ModelCall(
        model=model, input_size=input_size, inputs=called, loss=loss, loop=loop,
        phase=question.phase,
    )  # fmt: skip
    predicted_as = None
    if is_named:
        predicted_as = Predicted(model, input_size=input_size)
    elif loss is None and targets is None and not keywords and len(inputs) == 1:
        predicted_as = Predicted(model, example_input=inputs[0])
    return Estimate(
        name=str(model) if is_named else type(model).__name__,
        predicted_as=predicted_as,
        question=question,
        precision=arithmetic,
        step=call.trace(question.given_settings(), batch_size),
    )


@dataclass(frozen=True)
class Predicted:
    """A model whose memory trained heads predict."""

    model: Any
    input_size: int | None = None
    example_input: Any = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Estimate:
    """The simulated memory of a step, for every batch size."""

    name: str
    predicted_as: Predicted | None
    question: Question
    precision: Precision
    step: SimulatedStep
    _predictors: dict[str, Callable[[int], MemoryInterval] | None] = field(default_factory=dict)

    @property
    def batch_size(self) -> int:
        return self.step.batch_size

    @property
    def trace(self) -> StepTrace:
        return self.step.trace

    @property
    def only_batch(self) -> int | None:
        return self.step.only_batch

    def memory(self, device: str = DEFAULT_DEVICE, batch_size: int | None = None) -> MemoryInterval:
        """Return the memory of the step on a device."""
        capacity_of(device)
        refuse_precision(device, self.precision)
        size, step = batch_size or self.batch_size, self.step
        beside_mib = beside_step_mib(device, step.phase)
        simulated_mib = step.memory(size).reserved_with_workspace_mib + beside_mib
        predicted = self._predicted(device)
        if predicted is None:
            return simulated_interval(simulated_mib)
        usual = SimulatedStep(
            trace=step.trace, origins=(), loop=loop_of(step.loop.optimizer, self.precision),
            phase=step.phase, batch_size=size, only_batch=step.only_batch,
        )  # fmt: skip
        usual_mib = usual.memory(size).reserved_with_workspace_mib + beside_mib
        return predicted(size).times(simulated_mib / usual_mib)

    def fits(self, device: str, batch_size: int | None = None) -> bool:
        memory = self.memory(device, batch_size)
        return memory.verdict(capacity_of(device)) is Verdict.FITS

    def capacity_mib(self, device: str) -> float:
        return capacity_of(device)

    def largest_batch(self, device: str) -> int:
        return largest_batch(lambda size: self.memory(device, size), capacity_of(device))

    def breakdown(self) -> MemoryBreakdown:
        return self.step.breakdown(self.batch_size)

    def _predicted(self, device: str) -> Callable[[int], MemoryInterval] | None:
        if self.predicted_as is None:
            return None
        from trappm.prediction.answering import memory_of
        from trappm.prediction.models.subjects import subject_of

        if device not in self._predictors:
            self._predictors[device] = None
            this = self.predicted_as
            try:
                subject = subject_of(
                    this.model, input_size=this.input_size, example_input=this.example_input
                )
                [key] = self.question.device_keys(device, None)
                self._predictors[device] = memory_of(self.question, subject, key)
            except (UnsupportedModelError, SnapshotError):
                pass
        return self._predictors[device]


@dataclass(frozen=True, kw_only=True)
class EstimateRequest:
    """A step of a named model and the cards that it is to fit, for the server.

    Raises:
        InputError: What is seen to be wrong before the model is traced.
    """

    model: str
    batch_size: int
    input_size: int | None
    phase: str
    precision: str
    memory_format: str
    optimizer: str
    devices: Sequence[str]
    depth: int
    """Of the tree of modules."""
    snapshot: str | None = None

    def __post_init__(self) -> None:
        member("phase", Phase, self.phase)
        member("memory_format", MemoryFormat, self.memory_format)
        precision = member("precision", Precision, self.precision)
        loop_of(self.optimizer, precision)
        for device in self.devices:
            capacity_of(device)
        if all(precision_gap(device, precision) for device in self.devices):
            refuse_precision(self.devices[0], precision)

    def answered_by(self, process: TracingProcess, deadline: Deadline) -> bytes:
        """Return the answer as JSON, made in another process; raises as its `look` does."""
        from trappm.prediction.models.tracing import TracingRequest

        traced = TracingRequest(self.model, False, self.input_size, estimate=asdict(self))
        return process.look(traced, self.model, deadline)

    def answer(self) -> dict[str, Any]:
        """Return the memory on each card and its breakdown on the first, for JSON."""
        settings = asdict(self)
        devices, depth = settings.pop("devices"), settings.pop("depth")
        precision = Precision(self.precision)
        gaps = {name: gap for name in devices if (gap := precision_gap(name, precision))}
        rows = {
            name: predict(device=name, **settings).to_dict(breakdown_depth=depth)
            for name in devices
            if name not in gaps
        }
        first = next(iter(rows.values()))["memory_breakdown"]
        return {
            **{name: getattr(self, name) for name in ("model", "batch_size", "phase", "precision")},
            "devices": {
                name: {
                    **{
                        key: row[key]
                        for key in (
                            "memory_mib",
                            "capacity_mib",
                            "fits",
                            "verdict",
                            "largest_batch",
                        )
                    },
                    "memory_interval_mib": row["intervals"]["memory_mib"],
                    "parts_mib": row["memory_breakdown"]["parts_mib"],
                }
                for name, row in rows.items()
            },
            "left_out": [{"device": name, "reason": gap} for name, gap in gaps.items()],
            "moment": first["moment"],
            "modules_mib": first["modules_mib"],
            "largest": first["largest"],
            "remarks": [],
        }
