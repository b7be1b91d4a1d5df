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
from onnx_export import BUFFERS_KEY, file_graph

from trappm.profiler.errors import ModelFileError, UnsupportedModelError
from trappm.profiler.static_profile import StepSource, file_profile

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


@pytest.mark.parametrize(
    "content", [b"", b"this is a text, not a model\n" * 9, b"PK\x03\x04" + bytes(50), bytes(100)]
)
def test_what_is_not_onnx_is_refused(tmp_path, content):
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match="not an ONNX"):
        file_graph(path)


def test_what_is_not_there_or_not_a_file_is_refused(tmp_path):
    with pytest.raises(ModelFileError, match="No such file"):
        file_graph(tmp_path / "missing.onnx")
    with pytest.raises(ModelFileError, match="cannot read"):
        file_graph(tmp_path)


def test_a_file_that_is_too_large_is_refused_unread(tmp_path):
    path = tmp_path / "m.onnx"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse: reading it would take all memory
    with pytest.raises(ModelFileError, match=r"1,099,511,627,776 bytes; at most"):
        file_graph(path)


@pytest.mark.parametrize(
    "location", ["/etc/passwd", "../secret.bin", "a/../../secret.bin", "..\\secret.bin", ""]
)
def test_external_data_may_not_leave_the_folder(write, tmp_path, location):
    (tmp_path.parent / "secret.bin").write_bytes(bytes(1000))
    tensor = helper.make_tensor("w", TensorProto.FLOAT, [100], np.zeros(100))
    tensor.ClearField("float_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    path = write(helper.make_node("Mul", ["x", "w"], ["y"]), initializers=[tensor])
    with pytest.raises(ModelFileError, match="outside its folder"):
        file_graph(path)


def test_external_data_may_not_leave_the_folder_by_a_link(write, tmp_path):
    (tmp_path / "link.bin").symlink_to("/etc/passwd")
    tensor = TensorProto(name="s", data_type=TensorProto.INT64, dims=[2])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="link.bin")
    path = write(helper.make_node("Reshape", ["x", "s"], ["y"]), initializers=[tensor])
    with pytest.raises(ModelFileError, match="outside its folder"):
        file_graph(path)


def test_a_shape_in_external_data_is_read_or_asked_for(write, tmp_path):
    tensor = TensorProto(name="s", data_type=TensorProto.INT64, dims=[2])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="shape.bin")
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 192])
    node = helper.make_node("Reshape", ["x", "s"], ["y"])
    path = write(node, outputs=[result], initializers=[tensor])
    with pytest.raises(ModelFileError, match="keep the data file next to the model"):
        file_graph(path)
    (tmp_path / "shape.bin").write_bytes(np.array([-1, 192], dtype=np.int64).tobytes())
    assert file_graph(path).at(4).output_shapes.tolist() == [[4, 192, 0, 0, 0, 0]]


def test_of_external_data_only_what_the_tensor_needs_is_read(write, tmp_path):
    tensor = TensorProto(name="s", data_type=TensorProto.INT64, dims=[2])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="shape.bin")
    tensor.external_data.add(key="length", value=str(1 << 40))
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 192])
    node = helper.make_node("Reshape", ["x", "s"], ["y"])
    path = write(node, outputs=[result], initializers=[tensor])
    with (tmp_path / "shape.bin").open("wb") as file:
        file.write(np.array([-1, 192], dtype=np.int64).tobytes())
        file.truncate(1 << 40)  # sparse: reading it would take all memory
    with resources_watched() as peak_bytes:
        assert file_graph(path).at(4).output_shapes.tolist() == [[4, 192, 0, 0, 0, 0]]
    assert peak_bytes() < 100 << 20


def test_models_of_anything_but_images_are_refused(write):
    words = helper.make_tensor_value_info("x", TensorProto.INT64, ["n", 128])
    cast = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)
    with pytest.raises(ModelFileError, match="no image-like input"):
        file_graph(write(cast, inputs=[words]))


def test_two_image_inputs_are_refused(write):
    other = helper.make_tensor_value_info("z", TensorProto.FLOAT, ["n", 3, 8, 8])
    with pytest.raises(UnsupportedModelError, match=r"several image inputs \(x, z\)"):
        file_graph(write(helper.make_node("Add", ["x", "z"], ["y"]), inputs=[IMAGE, other]))


def tensor_input(name, *shape):
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


PICTURE = tensor_input("x", 2, 3, 32, 32)
FEATURES = tensor_input("y", 2, 8, 32, 32)
CONV = {"pads": [1, 1, 1, 1]}


@pytest.mark.parametrize("weights", ["inside", "left out"])
@pytest.mark.parametrize(
    ("nodes", "other"),
    [
        (["Add x z t", "Conv t w y"], tensor_input("z", 2, 3, 32, 32)),
        (["Conv x w a", "Conv z w b", "Add a b y"], tensor_input("z", 2, 3, 32, 32)),
        (["MatMul x z t", "Conv t w y"], tensor_input("z", 2, 3, 32, 32)),
    ],
    ids=["added", "in a convolution of its own", "as the factor of a product"],
)
def test_a_second_image_of_fixed_size_is_no_weight(write, nodes, other, weights):
    calls = [node.split() for node in nodes]
    path = write(
        *(helper.make_node(op, names, [out], **(CONV if op == "Conv" else {}))
          for op, *names, out in calls),
        **kernel(weights, PICTURE, other), outputs=[FEATURES],
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match=r"input 'z' of shape \[2, 3, 32, 32\]"):
        file_graph(path)


def kernel(weights, *inputs):
    if weights == "left out":
        return {"inputs": [*inputs, tensor_input("w", 8, 3, 3, 3)]}
    stored = helper.make_tensor("w", TensorProto.FLOAT, [8, 3, 3, 3], np.zeros(216))
    return {"inputs": inputs, "initializers": [stored]}


RELU_OF_T = helper.make_node("Relu", ["t"], ["y"])
SCORES = tensor_input("y", 2, 3, 32, 32)
SCALED = [
    helper.make_node("Mul", ["x", "z"], ["t"]),
    helper.make_node("Conv", ["t", "w"], ["y"], **CONV),
]


def test_what_a_model_is_given_when_it_runs_is_no_weight(write):
    scale = tensor_input("z", 1, 3, 1, 1)
    inside = kernel("inside", PICTURE, scale)
    with pytest.raises(UnsupportedModelError, match=r"input 'z' .* is not a weight"):
        file_graph(write(*SCALED, **inside, outputs=[FEATURES]))
    with pytest.raises(UnsupportedModelError, match=r"input 'z' .* is not a weight"):
        file_graph(write(SCALED[0], RELU_OF_T, inputs=[PICTURE, scale], outputs=[SCORES]))
    # Beside a kernel that is left out, it is the scale of a layer that is left out too.
    left_out = write(*SCALED, **kernel("left out", PICTURE, scale), outputs=[FEATURES])
    assert file_graph(left_out).parameters.tolist() == [3, 216]


def test_a_weight_is_told_by_its_use_through_what_is_folded(write):
    """As a linear layer whose exporter folds nothing, beside another whose weight is stored."""
    result = tensor_input("y", 2, 3, 32, 5)
    stored = helper.make_tensor("v", TensorProto.FLOAT, [7, 5], np.zeros(35))
    path = write(
        helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "t"], ["a"]),
        helper.make_node("MatMul", ["a", "v"], ["y"]),
        inputs=[PICTURE, tensor_input("w", 7, 32), tensor_input("unused", 2, 3)],
        outputs=[result],
        initializers=[stored],
    )
    assert file_graph(path).parameters.tolist() == [7 * 32, 35]


def test_scales_that_are_stored_as_weights_are_read_and_are_none(write):
    scales = helper.make_tensor("s", TensorProto.FLOAT, [4], [1.0, 1.0, 2.0, 2.0])
    kernel = helper.make_tensor("w", TensorProto.FLOAT, [8, 3, 3, 3], np.zeros(216))
    path = write(
        helper.make_node("Resize", ["x", "", "s"], ["t"], mode="nearest"),
        helper.make_node("Conv", ["t", "w"], ["y"], **CONV),
        outputs=[helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 8, 16, 16])],
        initializers=[scales, kernel],
    )
    profile = file_profile(path)
    assert profile.graph.operators == ("Resize", "Conv")
    assert profile.graph.parameters.tolist() == [0, 216]
    assert profile.graph.at(2).output_shapes[0].tolist() == [2, 3, 16, 16, 0, 0]
    assert profile.step_source is StepSource.REBUILT


def test_a_pipe_or_a_device_is_not_read(write, tmp_path):
    os.mkfifo(tmp_path / "pipe.onnx")
    for path in (tmp_path / "pipe.onnx", Path("/dev/zero")):
        with pytest.raises(ModelFileError, match="not a plain file"):
            file_graph(path)
    os.mkfifo(tmp_path / "shape.bin")
    tensor = TensorProto(name="s", data_type=TensorProto.INT64, dims=[2])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="shape.bin")
    with pytest.raises(ModelFileError, match="not a plain file"):
        file_graph(write(helper.make_node("Reshape", ["x", "s"], ["y"]), initializers=[tensor]))


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
    with pytest.raises(UnsupportedModelError, match="no output depends on the images"):
        file_graph(write(helper.make_node("Relu", ["w"], ["y"]), initializers=[weight]))


@pytest.mark.parametrize("value", ["not json", "5", '{"a": 1}', "[[1]]", "null"])
def test_strange_metadata_do_no_harm(write, value):
    path = write(RELU)
    model = onnx.load(path)
    helper.set_model_props(model, {BUFFERS_KEY: value})
    onnx.save(model, path)
    assert file_graph(path).operators == ("Relu",)


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


def function(name, *calls):
    names = ["a", *(f"t{i}" for i in range(len(calls) - 1)), "b"]
    nodes = [
        helper.make_node(call, [names[i]], [names[i + 1]], domain="my" if call != "Relu" else "")
        for i, call in enumerate(calls)
    ]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("my", 1)]
    return helper.make_function("my", name, ["a"], ["b"], nodes, opsets)


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ([function("f0", "f0")], "call themselves"),
        ([function("f0", "f1"), function("f1", "f0", "f0")], "call themselves"),
        ([function(f"f{i}", *(f"f{i + 1}",) * 2) for i in range(40)] + [function("f40", "Relu")],
         r"nodes \(functions expanded\)"),
    ],
    ids=["recursion", "mutual recursion", "a billion laughs"],
)  # fmt: skip
def test_functions_that_expand_without_end_are_refused(write, functions, message):
    path = write(helper.make_node("f0", ["x"], ["y"], domain="my"))
    model = onnx.load(path)
    model.opset_import.append(helper.make_opsetid("my", 1))
    model.functions.extend(functions)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelFileError, match=message):
        file_graph(path)


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


def test_too_many_inputs_of_nodes_are_refused(write):
    many = [helper.make_node("Sum", ["x"] * 100_000, [name]) for name in ("a", "b")]
    with pytest.raises(ModelFileError, match="have 200005 inputs and outputs; at most 200000"):
        file_graph(write(*many, helper.make_node("Add", ["a", "b"], ["y"])))


def test_too_many_inputs_in_functions_are_refused_before_they_are_expanded(write):
    path = write(*(helper.make_node("f", ["x"], [name], domain="my") for name in ("t", "y")))
    model = onnx.load(path)
    model.opset_import.append(helper.make_opsetid("my", 1))
    fan_in = function("f", "Relu")
    fan_in.node[0].op_type = "Sum"
    fan_in.node[0].input.extend(["a"] * 100_000)
    model.functions.append(fan_in)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelFileError, match=r"200008 inputs and outputs \(functions expanded\)"):
        file_graph(path)


LATEST = onnx.defs.onnx_opset_version()
