"""The rules for shapes against ONNX's own inference, which knows most of them."""

import onnx
import pytest
from onnx_export import export_onnx

from trappm.profiler.onnx_files.opening import load_checked
from trappm.profiler.onnx_files.shapes import ShapeInference


@pytest.mark.parametrize(
    ("architecture", "input_size"),
    [("test_resnet", 64), ("test_efficientnet", 64), ("test_vit", 64), ("test_convnext", 64)],
)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_shapes_are_those_of_onnx(tmp_path, architecture, input_size, batch_size):
    export_onnx(architecture, input_size, tmp_path / "m.onnx")
    model = load_checked(tmp_path / "m.onnx")
    proto = onnx.load(tmp_path / "m.onnx")
    image = next(value for value in proto.graph.input if value.name == model.image)
    image.type.tensor_type.shape.dim[0].dim_value = batch_size
    for output in proto.graph.output:
        output.type.tensor_type.ClearField("shape")
    graph = onnx.shape_inference.infer_shapes(proto, data_prop=True).graph
    expected = {
        value.name: tuple(axis.dim_value for axis in value.type.tensor_type.shape.dim)
        for value in (*graph.value_info, *graph.output)
        if all(axis.HasField("dim_value") for axis in value.type.tensor_type.shape.dim)
        and value.type.tensor_type.HasField("shape")
    }
    depends = {model.image}
    for operation in model.operations:
        if operation.operator != "Shape" and not depends.isdisjoint(operation.inputs):
            depends.update(operation.outputs)
    inference = ShapeInference(model, depends, expected)
    first = inference.at((3, 3, input_size, input_size))
    found = inference.at((batch_size, 3, input_size, input_size))
    assert len(expected) > 0.9 * len(depends)
    assert {name: found[name] for name in expected} == expected
    assert any(first[name] != found[name] for name in expected)
