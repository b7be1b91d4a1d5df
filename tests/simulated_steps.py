"""Steps whose memory is simulated, without trained heads."""

from __future__ import annotations

import inspect
from typing import Any

from trappm.prediction.answer import answer_by_simulation
from trappm.prediction.models import Module, subject_of
from trappm.prediction.prediction import Prediction
from trappm.prediction.question import Question
from trappm.profiler.records import Phase
from trappm.profiler.traced_step import Allocations

_QUESTION = ("batch_size", "precision", "memory_format", "optimizer", "phase")


def simulated(
    model: Any, *args: Any, loss: Any = None, targets: Any = None, device: str = "a100", **more: Any
) -> Prediction:
    """Return the simulated memory of a name, or of a module that is called with these inputs."""
    question = Question(**{name: more.pop(name) for name in _QUESTION if name in more})
    if isinstance(model, str):
        return answer_by_simulation(question, subject_of(model, **more), device, "simulated")
    names = inspect.signature(model.forward).parameters
    example: Any = args
    if more:
        example = {**dict(zip(names, args, strict=False)), **more}
    return answer_by_simulation(
        question, Module(model, example, targets, loss), device, "simulated"
    )


def trace_of(prediction: Prediction) -> Allocations:
    """Trace the step again."""
    assert prediction.subject is not None
    phase = Phase(prediction.phase)
    subject, size = prediction.subject, prediction.batch_size
    return subject.trace(prediction.settings, phase, size).allocations
