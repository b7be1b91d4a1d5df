"""Every node test and back-end model of the `onnx` package: a result, or one clear refusal."""

import contextlib
import warnings
from collections import Counter
from pathlib import Path

import onnx.backend.test
import pytest
from onnx.backend.test.loader import load_model_tests

from trappm.extensions.onnx.file_trace import file_trace
from trappm.profiler.errors import ModelFileError, UnsupportedModelError

SAVED = Path(onnx.backend.test.__file__).parent / "data"


def outcome(path):
    with contextlib.suppress(ModelFileError, UnsupportedModelError):
        assert file_trace(path).graph.operators
        return "read"
    return "refused"


@pytest.mark.slow
def test_each_node_test_is_read_or_refused(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NumPy, about the values that the tests expect
        cases = load_model_tests(kind="node")
    outcomes = Counter()
    for case in cases:
        path = tmp_path / f"{case.name}.onnx"
        path.write_bytes(case.model.SerializeToString())
        outcomes[outcome(path)] += 1
        path.unlink()
    assert outcomes["read"] > 300  # most others compute nothing from an input with a batch
    assert outcomes["refused"] > 500


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("light", marks=pytest.mark.slow),
        "pytorch-converted",
        "pytorch-operator",
        "simple",
    ],
)
def test_each_model_of_the_back_end_corpus_is_read_or_refused(kind):
    models = sorted((SAVED / kind).glob("**/*.onnx"))
    assert len(models) > 5
    assert {outcome(path) for path in models} <= {"read", "refused"}
