"""Files made to do harm, each of which once ended in a traceback, or in minutes and gigabytes."""

import itertools

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_export import file_graph

from trappm.profiler.errors import ModelFileError, UnsupportedModelError
from trappm.profiler.onnx_files.module import MAX_TRAINED_OPERATIONS
from trappm.profiler.static_profile import file_profile

SHAPE = ["n", 3, 8, 8]
IMAGE = helper.make_tensor_value_info("x", TensorProto.FLOAT, SHAPE)
RELU = helper.make_node("Relu", ["x"], ["y"])


@pytest.fixture
def write(tmp_path):
    def write(*nodes, outputs=("y",), initializers=(), functions=(), domains=()):
        results = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, SHAPE) for name in outputs
        ]
        graph = helper.make_graph(nodes, "g", [IMAGE], results, list(initializers))
        opsets = [helper.make_opsetid("", 17), *(helper.make_opsetid(d, 1) for d in domains)]
        model = helper.make_model(graph, opset_imports=opsets, functions=list(functions))
        path = tmp_path / "m.onnx"
        path.write_bytes(model.SerializeToString())
        return path

    return write


@pytest.mark.parametrize("copied", ["x", "y"])
def test_an_output_may_be_a_copy_of_the_image_or_of_another_output(write, copied):
    copies = (
        helper.make_node("Identity", [copied], ["a"]),
        helper.make_node("Identity", ["a"], ["z"]),
    )
    assert file_graph(write(RELU, *copies, outputs=("y", "z"))).operators == ("Relu",)


def test_a_file_that_computes_nothing_is_refused(write):
    with pytest.raises(UnsupportedModelError, match="no output depends on the images, but as a co"):
        file_graph(write(helper.make_node("Identity", ["x"], ["y"])))


@pytest.mark.parametrize("field", ["node", "tensor", "output", "attribute"])
def test_a_name_that_is_not_utf8_is_told(write, field):
    mark = "\u00e9\u00e9\u00e9"
    weight = helper.make_tensor(mark if field == "tensor" else "w", TensorProto.FLOAT, [1], [0])
    node = helper.make_node(
        "Mul", ["x", weight.name], ["y"], name=mark if field == "node" else "n",
        **({mark: 1} if field == "attribute" else {}),
    )  # fmt: skip
    outputs = ("y", mark) if field == "output" else ("y",)
    path = write(node, outputs=outputs, initializers=[weight])
    path.write_bytes(path.read_bytes().replace(mark.encode(), b"\xff\xfe\xff\xfe\xff\xfe"))
    with pytest.raises(ModelFileError, match="is not UTF-8"):
        file_graph(path)


def test_an_unknown_element_type_is_told(write):
    cast = helper.make_node("Cast", ["x"], ["c"], to=99)
    path = write(cast, helper.make_node("Relu", ["c"], ["y"]))
    with pytest.raises(UnsupportedModelError, match="number 99"):
        file_profile(path)


def test_a_tensor_in_an_attribute_may_not_lie_outside_the_file(write, tmp_path):
    (tmp_path / "secret").write_bytes(np.arange(2).tobytes())
    value = TensorProto(data_type=TensorProto.INT64, dims=[1])
    value.data_location = TensorProto.EXTERNAL
    value.external_data.add(key="location", value="secret")
    shape = helper.make_tensor("s", TensorProto.INT64, [1], [4])
    made = helper.make_node("ConstantOfShape", ["s"], ["t"])
    made.attribute.add(name="value", type=onnx.AttributeProto.TENSOR).t.CopyFrom(value)
    path = write(made, helper.make_node("Reshape", ["x", "t"], ["y"]), initializers=[shape])
    with pytest.raises(ModelFileError, match="external data"):
        file_graph(path)


def test_a_weight_of_a_million_axes_is_refused_before_they_are_multiplied(write):
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2**62] * 1_000_000)
    path = write(helper.make_node("Mul", ["x", "w"], ["y"]), initializers=[weight])
    with pytest.raises(ModelFileError, match="1000000 axes"):
        file_graph(path)


@pytest.mark.parametrize("operator", [pytest.param("Conv", marks=pytest.mark.slow), "Relu"])
def test_the_step_of_a_very_long_chain_is_not_traced(write, operator):
    names = ["x", *(f"t{i}" for i in range(MAX_TRAINED_OPERATIONS)), "y"]
    weight = helper.make_tensor("w", TensorProto.FLOAT, [3, 3, 1, 1], [0] * 9)
    more = ["w"] if operator == "Conv" else []
    chain = [
        helper.make_node(operator, [before, *more], [after])
        for before, after in itertools.pairwise(names)
    ]
    profile = file_profile(write(*chain, initializers=[weight]))
    assert profile.step_source is None
    assert f"at most {MAX_TRAINED_OPERATIONS:,}" in (profile.step_refusal or "")


def test_a_very_wide_sum_is_not_added_up(write):
    profile = file_profile(write(helper.make_node("Sum", ["x"] * 150_000, ["y"])))
    assert "a Sum of 150,000 tensors" in (profile.step_refusal or "")


@pytest.mark.parametrize("alias", ["", "ai.onnx"])
def test_functions_are_counted_by_either_name_of_onnx_own_domain(write, alias):
    """Ten levels of ten calls each, of functions that claim to be ONNX's own."""
    functions = []
    for level in range(10):
        below = "Relu" if level == 0 else f"F{level - 1}"
        nodes = [helper.make_node(below, [f"a{i}"], [f"a{i + 1}"], domain=alias) for i in range(10)]
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx", 17)]
        functions.append(
            helper.make_function("ai.onnx", f"F{level}", ["a0"], ["a10"], nodes, opsets)
        )
    path = write(helper.make_node("F9", ["x"], ["y"], domain=alias), functions=functions)
    with pytest.raises(ModelFileError, match="functions expanded"):
        file_graph(path)


def test_a_function_cannot_copy_a_long_name_many_times(write):
    opsets = [helper.make_opsetid("", 17)]
    long = "n" * 100_000
    body = [helper.make_node("Relu", ["a"], ["b"]), helper.make_node("Add", ["b", "a"], ["c"])]
    function = helper.make_function("f", "F", ["a"], ["c"], body, opsets)
    calls = [helper.make_node("F", [long], [f"t{i}"], domain="f") for i in range(2000)]
    first = helper.make_node("Relu", ["x"], [long])
    last = helper.make_node("Relu", ["t1"], ["y"])
    with pytest.raises(ModelFileError, match="more than 1,000 letters"):
        file_graph(write(first, *calls, last, functions=[function], domains=["f"]))


@pytest.mark.parametrize("holder", ["call", "default"])
def test_a_function_cannot_hand_a_large_attribute_on_many_times(write, holder):
    """Nineteen gigabytes of numbers, were it put in place."""
    body = [onnx.NodeProto(op_type="Elu", input=["a"], output=[f"b{i}"]) for i in range(5000)]
    for node in body:
        node.attribute.add(name="v", ref_attr_name="v", type=onnx.AttributeProto.INTS)
    numbers = helper.make_attribute("v", [1] * 1_000_000)
    function = helper.make_function("f", "F", ["a"], ["b1"], body, [helper.make_opsetid("", 17)])
    call = helper.make_node("F", ["x"], ["y"], domain="f")
    if holder == "call":
        function.attribute.append("v")
        call.attribute.append(numbers)
    else:
        function.attribute_proto.append(numbers)
    with pytest.raises(ModelFileError, match="its functions expand to"):
        file_graph(write(call, functions=[function], domains=["f"]))
