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


@pytest.fixture(scope="module")
def node_tests():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NumPy, about the values that the tests expect
        return [(case.name, case.model) for case in load_model_tests(kind="node")]


def outcome(path):
    with contextlib.suppress(ModelFileError, UnsupportedModelError):
        assert file_trace(path).graph.operators
        return "read"
    return "refused"


@pytest.mark.parametrize("every", [12, pytest.param(1, marks=pytest.mark.slow)])
def test_each_node_test_is_read_or_refused(node_tests, tmp_path, every):
    outcomes = Counter()
    for name, model in node_tests[::every]:
        path = tmp_path / f"{name}.onnx"
        path.write_bytes(model.SerializeToString())
        outcomes[outcome(path)] += 1
        path.unlink()
    assert outcomes["read"] > 300 // every  # most others compute nothing from an input with a batch
    assert outcomes["refused"] > 500 // every


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
