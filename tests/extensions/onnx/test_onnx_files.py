"""Files that are not what they claim to be: each is refused with one clear error, quickly."""

import contextlib
import itertools
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
from trappm.extensions.onnx.file_trace import file_trace
from trappm.profiler.errors import ModelFileError, UnsupportedModelError
from trappm.profiler.traced_step import TraceSource

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


@pytest.mark.parametrize(
    "content", [b"", b"this is a text, not a model\n" * 9, b"PK\x03\x04" + bytes(50), bytes(100)]
)
def test_what_is_not_onnx_is_refused(tmp_path, content):
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match="not an ONNX"):
        file_graph(path)


def test_what_is_not_there_or_not_a_file_or_too_large_is_refused(tmp_path):
    with pytest.raises(ModelFileError, match="No such file"):
        file_graph(tmp_path / "missing.onnx")
    with pytest.raises(ModelFileError, match="cannot read"):
        file_graph(tmp_path)
    path = tmp_path / "m.onnx"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse: reading it would take all memory
    with pytest.raises(ModelFileError, match=r"1,099,511,627,776 bytes; at most"):
        file_graph(path)


@pytest.mark.parametrize(
    "location",
    ["../secret.bin", "a/../../secret.bin", "link.bin", "", "loop", "loop/x.bin", "loop/../x.bin"],
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


CONV = {"pads": [1, 1, 1, 1]}


def test_scales_that_are_stored_as_weights_are_read_and_are_none(write):
    scales = helper.make_tensor("s", TensorProto.FLOAT, [4], [1.0, 1.0, 2.0, 2.0])
    kernel = helper.make_tensor("w", TensorProto.FLOAT, [8, 3, 3, 3], np.zeros(216))
    path = write(
        helper.make_node("Resize", ["x", "", "s"], ["t"], mode="nearest"),
        helper.make_node("Conv", ["t", "w"], ["y"], **CONV),
        outputs=[helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 8, 16, 16])],
        initializers=[scales, kernel],
    )
    made = file_trace(path)
    assert made.graph.operators == ("Resize", "Conv")
    assert made.graph.parameters.tolist() == [0, 216]
    assert made.graph.at(2).output_shapes[0].tolist() == [2, 3, 16, 16, 0, 0]
    assert made.source is TraceSource.REBUILT


def test_a_pipe_or_a_device_is_not_read(write, tmp_path):
    os.mkfifo(tmp_path / "pipe.onnx")
    for path in (tmp_path / "pipe.onnx", Path("/dev/zero")):
        with pytest.raises(ModelFileError, match="not a plain file"):
            file_graph(path)
    os.mkfifo(tmp_path / "shape.bin")
    with pytest.raises(ModelFileError, match="not a plain file"):
        file_graph(write(RESHAPE, initializers=[outside("shape.bin")]))


def test_nodes_out_of_order_are_refused(write):
    loop = [helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Add", ["x", "a"], ["b"])]
    with pytest.raises(ModelFileError, match="not a valid ONNX model"):
        file_graph(write(*loop, helper.make_node("Relu", ["b"], ["y"])))


def test_an_unknown_operator_is_named(write):
    node = helper.make_node("Frobnicate", ["x"], ["y"], domain="my.company")
    path = write(node)
    model = onnx.load(path)
    model.opset_import.append(helper.make_opsetid("my.company", 1))
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "m"
    onnx.save(model, path)
    with pytest.raises(UnsupportedModelError, match="Frobnicate"):
        file_graph(path)


def test_control_flow_is_refused(write):
    branch = helper.make_graph([helper.make_node("Relu", ["x"], ["b"])], "b", [], [RESULT])
    branch.output[0].name = "b"
    condition = helper.make_tensor("c", TensorProto.BOOL, [], [True])
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    with pytest.raises(UnsupportedModelError, match="control flow"):
        file_graph(write(node, initializers=[condition]))


def test_sizes_beyond_all_bounds_are_refused(write):
    repeats = helper.make_tensor("r", TensorProto.INT64, [4], [1, 2**31, 2**31, 1])
    with pytest.raises(UnsupportedModelError, match="would have the shape"):
        file_graph(write(helper.make_node("Tile", ["x", "r"], ["y"]), initializers=[repeats]))
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2**62])
    with pytest.raises(ModelFileError, match="'w' has shape"):
        file_graph(write(helper.make_node("Mul", ["x", "w"], ["y"]), initializers=[weight]))


def test_an_output_that_ignores_the_image_is_refused(write):
    weight = helper.make_tensor("w", TensorProto.FLOAT, [1, 3, 8, 8], np.zeros(192))
    with pytest.raises(UnsupportedModelError, match="no output depends on the inputs"):
        file_graph(write(helper.make_node("Relu", ["w"], ["y"]), initializers=[weight]))


# Bombs: small files that ask for much.


def integers(name, *values):
    return helper.make_tensor(name, TensorProto.INT64, [len(values)], values)


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


def test_a_shape_that_is_doubled_forty_times_is_refused(write):
    nodes = [helper.make_node("Shape", ["x"], ["s0"])]
    nodes += [helper.make_node("Concat", [f"s{i}"] * 2, [f"s{i + 1}"], axis=0) for i in range(40)]
    path = write(*nodes, helper.make_node("Reshape", ["x", "s40"], ["y"]))
    with pytest.raises(UnsupportedModelError):
        file_graph(path)


def test_axes_without_end_are_refused(write):
    nodes = [helper.make_node("Unsqueeze", ["x" if i == 0 else f"t{i - 1}"], [f"t{i}"],
                              axes=[0]) for i in range(9000)]  # fmt: skip
    path = write(*nodes, helper.make_node("Relu", ["t8999"], ["y"]), opset=11)
    with pytest.raises(UnsupportedModelError, match="axes"):
        file_graph(path)
    weight = helper.make_tensor("w", TensorProto.FLOAT, [1] * 1000, [1.0])
    with pytest.raises(ModelFileError, match="1000 axes"):
        file_graph(write(helper.make_node("Mul", ["x", "w"], ["y"]), initializers=[weight]))


def test_too_many_nodes_are_refused(write):
    names = ["x", *(f"t{i}" for i in range(20_000)), "y"]
    nodes = [helper.make_node("Relu", [a], [b]) for a, b in itertools.pairwise(names)]
    with pytest.raises(ModelFileError, match="20001 nodes; at most 20000"):
        file_graph(write(*nodes))


@pytest.mark.parametrize("node", [helper.make_node("Relu", ["x"], []),
                                  helper.make_node("Constant", [], [], value_int=1)])  # fmt: skip
def test_a_node_without_an_output_is_refused(write, node):
    with pytest.raises(ModelFileError, match="no input or output"):
        file_graph(write(node, RELU))


@pytest.mark.parametrize("copied", ["x", "y"])
def test_an_output_may_be_a_copy_of_the_image_or_of_another_output(write, copied):
    copies = [helper.make_node("Identity", [a], [b]) for a, b in ((copied, "a"), ("a", "z"))]
    copy = helper.make_tensor_value_info("z", TensorProto.FLOAT, ["n", 3, 8, 8])
    assert file_graph(write(RELU, *copies, outputs=[RESULT, copy])).operators == ("Relu",)


def test_a_file_that_computes_nothing_is_refused(write):
    with pytest.raises(UnsupportedModelError, match="no output depends on the inputs, but as a co"):
        file_graph(write(helper.make_node("Identity", ["x"], ["y"])))


def test_an_unknown_element_type_is_told(write):
    cast = helper.make_node("Cast", ["x"], ["c"], to=99)
    path = write(cast, helper.make_node("Relu", ["c"], ["y"]))
    with pytest.raises(UnsupportedModelError, match="number 99"):
        file_trace(path)


def test_a_tensor_in_an_attribute_may_not_lie_outside_the_file(write, tmp_path):
    (tmp_path / "secret").write_bytes(np.arange(2).tobytes())
    value = outside("secret", name="")
    shape = helper.make_tensor("s", TensorProto.INT64, [1], [4])
    made = helper.make_node("ConstantOfShape", ["s"], ["t"])
    made.attribute.add(name="value", type=onnx.AttributeProto.TENSOR).t.CopyFrom(value)
    path = write(made, helper.make_node("Reshape", ["x", "t"], ["y"]), initializers=[shape])
    with pytest.raises(ModelFileError, match="external data"):
        file_graph(path)


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
        (lambda: folded("Mul", [3, 4], [2]), [6, 8]),
        (lambda: folded("Div", [-7], [2]), [-3]),  # toward zero
        (lambda: folded("Clip", [5], None, 3), [3]),
        (lambda: folded("Gather", [3, 4, 5], 1), 4),
        (lambda: folded("Slice", [1, 2, 3, 4], [1], [2**63 - 1], [0], [1]), [2, 3, 4]),
        (lambda: folded("Unsqueeze", [3], opset=11, axes=[0]), [[3]]),
        (lambda: folded("Unsqueeze", [3], [0]), [[3]]),
    ],
)
def test_small_tensors_are_those_of_onnx(result, expected):
    assert result() == [expected]


@pytest.mark.parametrize(
    "result",
    [
        lambda: folded("Div", [5], [0]),
        lambda: folded("Range", 0, 2**40, 1),
        lambda: folded("Range", -(2**31), 2**31 - 1, 1),
        lambda: folded("Expand", [1], [2**20, 2**20]),
        lambda: folded("Tile", [1], [2**20]),
        lambda: folded("ConstantOfShape", [2**40]),
        lambda: folded("Gather", list(range(1000)), list(range(1000)) * 2),
        lambda: folded("Softmax", [1, 2]),
    ],
)
def test_everything_else_is_unknown(result):
    assert result() == []
