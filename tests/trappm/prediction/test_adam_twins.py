"""Labels of Adam answer for AdamW, and the other way round; what is labelled is not renamed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trappm.learner.heads.predictions import StepSettings
from trappm.prediction.question import Question
from trappm.profiler.records import MemoryFormat, Optimizer, Precision


@pytest.mark.parametrize(
    ("labelled", "optimizer", "answered"),
    [
        (["adamw"], "adamw", "adamw"),
        (["adamw", "sgd"], "adam", "adamw"),
        (["sgd", "adam"], "adamw", "adam"),
        (["adam", "adamw"], "adamw", "adamw"),
        (["sgd"], "adamw", "adam"),
        (["adam"], "sgd", "sgd"),
    ],
)
def test_the_twin_that_has_labels_answers(labelled, optimizer, answered):
    rows = tuple(
        StepSettings(Precision.FP32, MemoryFormat.CONTIGUOUS, Optimizer(name)) for name in labelled
    )
    trained = SimpleNamespace(settings=rows)
    assert Question(optimizer=optimizer).settings(trained).optimizer == answered
