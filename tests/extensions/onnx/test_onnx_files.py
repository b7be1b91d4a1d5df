"""Files that are not what they claim to be: each is refused with one clear error, quickly."""

import contextlib
import itertools
import math
import os
import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_export import file_graph

from trappm.extensions.onnx.checked_model import Operation
from trappm.extensions.onnx.constant_folding import fold
from trappm.profiler.errors import ModelFileError, UnsupportedModelError

IMAGE = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8])
RESULT = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3, 8, 8])
RELU = helper.make_node("Relu", ["x"], ["y"])


@pytest.fixture
def write(tmp_path):
    def write(*nodes, inputs=(IMAGE,), outputs=(RESULT,), initializers=(), **options):
        graph = helper.make_graph(nodes, "g", list(inputs), list(outputs), list(initializers))
        opset = [helper.make_opsetid("", options.pop("opset", 17))]
        model = helper.make_model(graph, opset_imports=opset, **options)
        (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
        return tmp_path / "m.onnx"

    return write


def outside(location, name="s", **more):
    """A tensor of two integers that lies in another file."""
    tensor = TensorProto(name=name, data_type=TensorProto.INT64, dims=[2])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **more}.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


FLAT = np.array([-1, 192], dtype=np.int64).tobytes()
RESHAPE = helper.make_node("Reshape", ["x", "s"], ["y"])
FLAT_RESULT = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 192])


def test_what_is_not_there_or_not_a_file_or_too_large_is_refused(tmp_path):
    with pytest.raises(ModelFileError, match="No such file"):
        file_graph(tmp_path / "missing.onnx")
    path = tmp_path / "m.onnx"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse: reading it would take all memory
    with pytest.raises(ModelFileError, match=r"1,099,511,627,776 bytes; at most"):
        file_graph(path)


@pytest.mark.parametrize(
    "location",
    ["../secret.bin", "a/../../secret.bin", "link.bin", "", "loop"],
)
def test_external_data_may_not_leave_the_folder(write, tmp_path, location):
    (tmp_path.parent / "secret.bin").write_bytes(FLAT)
    (tmp_path / "link.bin").symlink_to(tmp_path.parent / "secret.bin")
    (tmp_path / "loop").symlink_to("loop")
    path = write(RESHAPE, initializers=[outside(location)])
    with pytest.raises(ModelFileError, match="external data of 's' cannot be read"):
        file_graph(path)


def test_a_shape_in_external_data_is_read_or_asked_for(write, tmp_path):
    path = write(RESHAPE, outputs=[FLAT_RESULT], initializers=[outside("shape.bin")])
    with pytest.raises(ModelFileError, match="keep the data file next to the model"):
        file_graph(path)
    (tmp_path / "shape.bin").write_bytes(FLAT)
    assert file_graph(path).at(4).output_shapes.tolist() == [[4, 192, 0, 0, 0, 0]]


def test_of_external_data_only_what_the_tensor_needs_is_read(write, tmp_path):
    tensor = outside("shape.bin", length=str(1 << 40))
    path = write(RESHAPE, outputs=[FLAT_RESULT], initializers=[tensor])
    with (tmp_path / "shape.bin").open("wb") as file:
        file.write(FLAT)
        file.truncate(1 << 40)  # sparse: reading it would take all memory
    with resources_watched() as peak_bytes:
        assert file_graph(path).at(4).output_shapes.tolist() == [[4, 192, 0, 0, 0, 0]]
    assert peak_bytes() < 100 << 20


def test_a_pipe_or_a_device_is_not_read(write, tmp_path):
    os.mkfifo(tmp_path / "pipe.onnx")
    for path in (tmp_path / "pipe.onnx", Path("/dev/zero")):
        with pytest.raises(ModelFileError, match="not a plain file"):
            file_graph(path)
    os.mkfifo(tmp_path / "shape.bin")
    with pytest.raises(ModelFileError, match="not a plain file"):
        file_graph(write(RESHAPE, initializers=[outside("shape.bin")]))


def integers(name, *values):
    return helper.make_tensor(name, TensorProto.INT64, [len(values)], values)


def floats(name, *sizes):
    return helper.make_tensor(name, TensorProto.FLOAT, sizes, np.zeros(math.prod(sizes)))


def chain(operator, names, **attributes):
    return [node(operator, [a], [b], **attributes) for a, b in itertools.pairwise(names)]


node = helper.make_node
BRANCH = helper.make_graph(
    [node("Relu", ["x"], ["b"])], "b", [],
    [helper.make_tensor_value_info("b", TensorProto.FLOAT, ["n", 3, 8, 8])],
)  # fmt: skip
IF = node("If", ["c"], ["y"], then_branch=BRANCH, else_branch=BRANCH)
CONDITION = helper.make_tensor("c", TensorProto.BOOL, [], [True])
LOOP = [node("Add", ["x", "b"], ["a"]), node("Add", ["x", "a"], ["b"]), node("Relu", ["b"], ["y"])]
MUL = node("Mul", ["x", "w"], ["y"])
MANY = ["x", *(f"t{i}" for i in range(20_000)), "y"]


@pytest.mark.parametrize(
    ("nodes", "weight", "message"),
    [
        (LOOP, None, "not a valid ONNX model"),
        ([IF], CONDITION, "control flow"),
        ([node("Tile", ["x", "w"], ["y"])], integers("w", 1, 2**31, 2**31, 1), "have the shape"),
        ([MUL], TensorProto(name="w", data_type=1, dims=[2**62]), "'w' has shape"),
        ([MUL], floats("w", *[1] * 1000), "1000 axes"),
        ([node("Relu", ["w"], ["y"])], floats("w", 1, 3, 8, 8), "no output depends on the inputs"),
        (chain("Relu", MANY), None, "20001 nodes; at most 20000"),
        ([node("Constant", [], [], value_int=1), RELU], None, "no input or output"),
        ([node("Cast", ["x"], ["c"], to=99), node("Relu", ["c"], ["y"])], None, "number 99"),
    ],
)
def test_impossible_graphs_are_refused(write, nodes, weight, message):
    path = write(*nodes, initializers=[weight] if weight else [], opset=11)
    with pytest.raises((ModelFileError, UnsupportedModelError), match=message):
        file_graph(path)


@pytest.mark.parametrize(
    "operator", ["ConstantOfShape", "Expand", "Tile", "Range", "Resize", "Pad"]
)
def test_no_memory_is_taken_for_a_tensor_that_a_file_asks_for(write, operator):
    """Each would be 64 TiB, made of nothing and added to the image."""
    many = 1 << 22
    nodes = {
        "ConstantOfShape": helper.make_node("ConstantOfShape", ["large"], ["bomb"]),
        "Expand": helper.make_node("Expand", ["one", "large"], ["bomb"]),
        "Tile": helper.make_node("Tile", ["one", "large"], ["bomb"]),
        "Range": helper.make_node("Range", ["zero", "last", "step"], ["bomb"]),
        "Resize": helper.make_node("Resize", ["one", "", "", "large"], ["bomb"]),
        "Pad": helper.make_node("Pad", ["one", "pads"], ["bomb"]),
    }
    constants = [
        helper.make_tensor("one", TensorProto.FLOAT, [1, 1, 1, 1], [1.0]),
        integers("large", 1, 1, many, many),
        integers("pads", 0, 0, 0, 0, 0, 0, many, many),
        *(helper.make_tensor(name, TensorProto.INT64, [], [value])
          for name, value in (("zero", 0), ("last", 1 << 44), ("step", 1))),
    ]  # fmt: skip
    add = helper.make_node("Mul", ["x", "scale"], ["y"])
    size = helper.make_node("Size", ["bomb"], ["count"])
    scale = helper.make_node("Cast", ["count"], ["scale"], to=TensorProto.FLOAT)
    path = write(nodes[operator], size, scale, add, initializers=constants)
    with resources_watched() as peak_bytes:
        assert file_graph(path).operators == ("Mul",)
    assert peak_bytes() < 100 << 20


@contextlib.contextmanager
def resources_watched():
    """The most that NumPy and Python held at once meanwhile."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# Small tensors of a file are computed; large, overflowing and undefined ones are not.


def folded(operator, *inputs, opset=17, **attributes):
    names = [f"i{place}" for place in range(len(inputs))]
    node = onnx.helper.make_node(operator, names, ["y"], **attributes)
    operation = Operation(operator, tuple(names), ("y",), attributes, node)
    values = [None if value is None else np.array(value, np.int64) for value in inputs]
    return [value.tolist() for value in fold(operation, values, opset)]


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (lambda: folded("Div", [-7], [2]), [-3]),  # toward zero
        (lambda: folded("Clip", [5], None, 3), [3]),
        (lambda: folded("Gather", [3, 4, 5], 1), 4),
        (lambda: folded("Slice", [1, 2, 3, 4], [1], [2**63 - 1], [0], [1]), [2, 3, 4]),
        (lambda: folded("Unsqueeze", [3], opset=11, axes=[0]), [[3]]),
    ],
)
def test_small_tensors_are_those_of_onnx(result, expected):
    assert result() == [expected]


@pytest.mark.parametrize(
    "result",
    [
        lambda: folded("Div", [5], [0]),
        lambda: folded("Range", -(2**31), 2**31 - 1, 1),
        lambda: folded("Expand", [1], [2**20, 2**20]),
        lambda: folded("ConstantOfShape", [2**40]),
        lambda: folded("Gather", list(range(1000)), list(range(1000)) * 2),
    ],
)
def test_everything_else_is_unknown(result):
    assert result() == []
