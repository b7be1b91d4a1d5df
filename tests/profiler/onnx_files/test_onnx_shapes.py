"""The shapes of a module rebuilt from a file against ONNX's own inference, tensor by tensor."""

import onnx
import pytest
import torch
from onnx_export import export_onnx

from trappm.profiler.onnx_files.module import RebuiltModule
from trappm.profiler.onnx_files.opening import load_checked


@pytest.mark.parametrize(
    ("architecture", "input_size"),
    [("test_resnet", 64), ("test_efficientnet", 64), ("test_vit", 64), ("test_convnext", 64)],
)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_shapes_are_those_of_onnx(tmp_path, architecture, input_size, batch_size):
    export_onnx(architecture, input_size, tmp_path / "m.onnx")
    proto = onnx.load(tmp_path / "m.onnx")
    image = next(value for value in proto.graph.input if value.name == "image")
    image.type.tensor_type.shape.dim[0].dim_value = batch_size
    for output in proto.graph.output:
        output.type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True).graph
    del proto.graph.output[:]
    proto.graph.output.extend(
        value
        for value in (*inferred.value_info, *inferred.output)
        if value.type.tensor_type.HasField("shape")
        and all(axis.HasField("dim_value") for axis in value.type.tensor_type.shape.dim)
    )
    onnx.save(proto, tmp_path / "all.onnx")
    expected = {
        value.name: tuple(axis.dim_value for axis in value.type.tensor_type.shape.dim)
        for value in proto.graph.output
    }
    module = RebuiltModule(load_checked(tmp_path / "all.onnx")).eval()
    actual = module(torch.empty(batch_size, 3, input_size, input_size, device="meta"))
    assert len(expected) > 0.9 * len({name for node in proto.graph.node for name in node.output})
    shapes = [tuple(value.shape) for value in actual]
    assert dict(zip(expected, shapes, strict=True)) == expected
