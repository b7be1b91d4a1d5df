"""What is answered of transformers: nobody's labels are of any."""

from dataclasses import replace

import numpy as np
import pytest

import trappm
from trappm.learner.heads.predictions import Predictions

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))


def test_memory_is_what_is_simulated_and_the_answer_says_so():
    question = {"batch_size": 4, "sequence_length": 64, "optimizer": "sgd"}
    answer = trappm.predict("hf:gpt2-tiny", device="a100", **question)
    simulated = trappm.estimate("hf:gpt2-tiny", **question).memory_mib("a100")
    assert answer.memory_mib == pytest.approx(simulated)
    low, high = answer.intervals["memory_mib"]
    assert low < simulated < high
    assert sum("no label is of a transformer" in remark for remark in answer.remarks) == 1


def test_heads_that_know_such_a_model_are_believed():
    none = np.zeros((2, 1))
    output = Predictions(
        metrics=("memory_mib",), median=none + 100, low=none + 90, high=none + 120,
        log_std=none + 0.1, disagreement=none + 0.1, outside=np.array([[True], [False]]),
    )  # fmt: skip
    other = output.where_outside("memory_mib", np.array([50.0, 60.0]), 0.05)
    assert other.median.tolist() == [[50.0], [100.0]]
    assert other.high[1] == 120
    assert other.low[0] < 50 < other.high[0] < 60
    assert replace(output, metrics=("power_w",)).where_outside(
        "memory_mib", np.ones(2), 0.1
    ).median.tolist() == [[100.0], [100.0]]
