"""Quantised ONNX files: not trained; for inference their weights count."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import trappm
from trappm.extensions.onnx.file_trace import file_trace
from trappm.profiler.errors import UnsupportedModelError

node = helper.make_node
SCALES = [numpy_helper.from_array(np.float32(0.1), "s"), numpy_helper.from_array(np.uint8(0), "z")]
WEIGHT = numpy_helper.from_array(np.zeros((16, 3, 3, 3), np.uint8), "w")
DESIGNS = {
    "between": [
        node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        node("DequantizeLinear", ["w", "s", "z"], ["v"]),
        node("Conv", ["d", "v"], ["c"]),
    ],
    "inside": [
        node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        node("QLinearConv", ["q", "s", "z", "w", "s", "z", "s", "z"], ["r"]),
        node("DequantizeLinear", ["r", "s", "z"], ["c"]),
    ],
}


@pytest.mark.parametrize("design", DESIGNS)
def test_quantized_files_are_not_trained_and_their_weights_count(design, tmp_path, monkeypatch):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path / "home"))
    image = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 32, 32])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", "o"])
    nodes = [*DESIGNS[design], node("Flatten", ["c"], ["y"])]
    graph = helper.make_graph(nodes, "g", [image], [result], [*SCALES, WEIGHT])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = tmp_path / "quantised.onnx"
    path.write_bytes(model.SerializeToString())

    assert file_trace(path).graph.at(4).parameters.sum() == 16 * 3 * 3 * 3
    with pytest.raises(UnsupportedModelError, match=r"is quantized .* phase infer"):
        trappm.predict(path, device="a100", batch_size=4)
    answer = trappm.predict(path, device="rtx4090", batch_size=4, phase="infer")
    assert "cannot be rebuilt" in answer.missing["step_time_ms"]  # told, not guessed
