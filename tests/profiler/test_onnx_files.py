"""Files that are not what they claim to be: each is refused with one clear error, quickly."""

import contextlib

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from torch import nn

from profiler.errors import InputError, ModelFileError, UnsupportedModelError
from profiler.export import BUFFERS_KEY, export_onnx
from profiler.onnx_reader import read_onnx

IMAGE = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8])
RESULT = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3, 8, 8])
RELU = helper.make_node("Relu", ["x"], ["y"])


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    path = tmp_path_factory.mktemp("valid") / "m.onnx"
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)
    export_onnx(nn.Sequential(*layers), 8, path)
    return path.read_bytes()


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
        read_onnx(path)


def test_what_is_not_there_or_not_a_file_is_refused(tmp_path):
    with pytest.raises(ModelFileError, match="No such file"):
        read_onnx(tmp_path / "missing.onnx")
    with pytest.raises(ModelFileError, match="cannot read"):
        read_onnx(tmp_path)


def test_a_file_that_is_too_large_is_refused_unread(tmp_path):
    path = tmp_path / "m.onnx"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse: reading it would take all memory
    with pytest.raises(ModelFileError, match=r"1,099,511,627,776 bytes; at most"):
        read_onnx(path)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_damaged_file_is_refused_or_read_but_never_ends_the_process(valid, tmp_path, data):
    content = bytearray(valid)
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    for _ in range(data.draw(st.integers(0, 4))):
        if content:
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with contextlib.suppress(InputError, UnsupportedModelError):
        assert read_onnx(path).operators


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(content=st.binary(max_size=300))
def test_random_bytes_are_refused(tmp_path, content):
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelFileError):
        read_onnx(path)


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
        read_onnx(path)


def test_external_data_may_not_leave_the_folder_by_a_link(write, tmp_path):
    (tmp_path / "link.bin").symlink_to("/etc/passwd")
    tensor = TensorProto(name="s", data_type=TensorProto.INT64, dims=[2])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="link.bin")
    path = write(helper.make_node("Reshape", ["x", "s"], ["y"]), initializers=[tensor])
    with pytest.raises(ModelFileError, match="outside its folder"):
        read_onnx(path)


def test_a_shape_in_external_data_is_read_or_asked_for(write, tmp_path):
    tensor = TensorProto(name="s", data_type=TensorProto.INT64, dims=[2])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="shape.bin")
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 192])
    node = helper.make_node("Reshape", ["x", "s"], ["y"])
    path = write(node, outputs=[result], initializers=[tensor])
    with pytest.raises(ModelFileError, match="keep the data file beside the model"):
        read_onnx(path)
    (tmp_path / "shape.bin").write_bytes(np.array([-1, 192], dtype=np.int64).tobytes())
    assert read_onnx(path).at(4).output_shapes.tolist() == [[4, 192, 0, 0, 0, 0]]


def test_models_of_anything_but_images_are_refused(write):
    words = helper.make_tensor_value_info("x", TensorProto.INT64, ["n", 128])
    cast = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)
    with pytest.raises(ModelFileError, match="no image-like input"):
        read_onnx(write(cast, inputs=[words]))


def test_two_image_inputs_are_refused(write):
    other = helper.make_tensor_value_info("z", TensorProto.FLOAT, ["n", 3, 8, 8])
    with pytest.raises(UnsupportedModelError, match=r"several image inputs \(x, z\)"):
        read_onnx(write(helper.make_node("Add", ["x", "z"], ["y"]), inputs=[IMAGE, other]))


def test_nodes_out_of_order_are_refused(write):
    loop = [helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Add", ["x", "a"], ["b"])]
    with pytest.raises(ModelFileError, match="not a valid ONNX model"):
        read_onnx(write(*loop, helper.make_node("Relu", ["b"], ["y"])))


def test_an_unknown_operator_is_named(write):
    node = helper.make_node("Frobnicate", ["x"], ["y"], domain="my.company")
    path = write(node)
    model = onnx.load(path)
    model.opset_import.append(helper.make_opsetid("my.company", 1))
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "m"
    onnx.save(model, path)
    with pytest.raises(UnsupportedModelError, match="Frobnicate"):
        read_onnx(path)


def test_control_flow_is_refused(write):
    branch = helper.make_graph([helper.make_node("Relu", ["x"], ["b"])], "b", [], [RESULT])
    branch.output[0].name = "b"
    condition = helper.make_tensor("c", TensorProto.BOOL, [], [True])
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    with pytest.raises(UnsupportedModelError, match="control flow"):
        read_onnx(write(node, initializers=[condition]))


def test_sizes_beyond_all_bounds_are_refused(write):
    repeats = helper.make_tensor("r", TensorProto.INT64, [4], [1, 2**31, 2**31, 1])
    with pytest.raises(UnsupportedModelError, match="would have the shape"):
        read_onnx(write(helper.make_node("Tile", ["x", "r"], ["y"]), initializers=[repeats]))
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2**62])
    with pytest.raises(ModelFileError, match="'w' has shape"):
        read_onnx(write(helper.make_node("Mul", ["x", "w"], ["y"]), initializers=[weight]))


def test_an_output_that_ignores_the_image_is_refused(write):
    weight = helper.make_tensor("w", TensorProto.FLOAT, [1, 3, 8, 8], np.zeros(192))
    with pytest.raises(ModelFileError, match="no output depends on the input 'x'"):
        read_onnx(write(helper.make_node("Relu", ["w"], ["y"]), initializers=[weight]))


@pytest.mark.parametrize("opset", [11, 13, 18, 21])
def test_opsets_old_and_new_are_read(write, opset):
    weight = helper.make_tensor("w", TensorProto.FLOAT, [3, 3, 1, 1], np.zeros(9))
    node = helper.make_node("Conv", ["x", "w"], ["y"])
    graph = read_onnx(write(node, initializers=[weight], opset=opset)).at(2)
    assert graph.macs.tolist() == [2 * 64 * 9]
    assert graph.parameters.tolist() == [9]


@pytest.mark.parametrize("value", ["not json", "5", '{"a": 1}', "[[1]]", "null"])
def test_strange_metadata_do_no_harm(write, value):
    path = write(RELU)
    model = onnx.load(path)
    helper.set_model_props(model, {BUFFERS_KEY: value})
    onnx.save(model, path)
    assert read_onnx(path).operators == ("Relu",)
