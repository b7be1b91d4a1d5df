"""The content hash sees what shapes do not tell, and sees it alike in a file and in a module."""

import math

import numpy as np
import onnx
import pytest
import torch
from onnx_export import export_onnx, file_graph
from small_modules import Function
from traced_steps import graph_of

from trappm.profiler.models.model_input import Sample


def save(path, nodes, *, weights=(), image_type=onnx.TensorProto.FLOAT):
    """The hash of a file that maps images (n, 4, 6, 6) to `y`."""
    value = onnx.helper.make_tensor_value_info
    stored = [
        onnx.helper.make_tensor(name, image_type, shape, np.zeros(math.prod(shape)))
        for name, shape in weights
    ]
    images = value("x", image_type, ["n", 4, 6, 6])
    graph = onnx.helper.make_graph(
        nodes, "g", [images], [value("y", image_type, ["n", 4, None, None])], stored
    )
    opsets = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    return file_graph(path).content_hash


node = onnx.helper.make_node
FLOAT, HALF = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16
BYTE = onnx.TensorProto.UINT8
BRANCHES = [node("Relu", ["x"], ["r"]), node("Sigmoid", ["x"], ["s"])]


def conv(**attributes):
    convolution = node("Conv", ["x", "w"], ["y"], **attributes)
    return {"nodes": [convolution], "weights": [("w", (4, 4, 3, 3))]}


def nodes(*given):
    return {"nodes": list(given)}


DIFFERENT_FILES = {
    "dilation": [conv(dilations=[d, d], pads=[d] * 4) for d in (1, 2)],
    "operands": [nodes(BRANCHES[0], node("Sub", pair, ["y"])) for pair in (["r", "x"], ["x", "r"])],
    "outputs": [
        nodes(node("Split", ["x"], ["a", "b"], axis=1), node("Concat", pair, ["y"], axis=1))
        for pair in (["a", "b"], ["b", "a"])
    ],
    "axis": [nodes(node("Softmax", ["x"], ["y"], axis=axis)) for axis in (2, 3)],
    "element type": [
        {**nodes(node("Transpose", ["x"], ["y"], perm=[0, 1, 3, 2])), "image_type": kind}
        for kind in (FLOAT, BYTE)
    ],
    "twice": [nodes(BRANCHES[0], node("Mul", ["r", other], ["y"])) for other in ("r", "x")],
}
SAME_FILES = {
    "half precision": [
        {**nodes(node("Relu", ["x"], ["y"])), "image_type": kind} for kind in (FLOAT, HALF)
    ],
    "defaults": [
        conv(),
        conv(dilations=[1, 1], group=1, pads=[0] * 4, strides=[1, 1], kernel_shape=[3, 3]),
    ],
    "automatic padding": [conv(auto_pad="SAME_UPPER"), conv(pads=[1] * 4)],
    "a sum": [nodes(*BRANCHES, node("Add", pair, ["y"])) for pair in (["r", "s"], ["s", "r"])],
    "names and order": [
        nodes(*BRANCHES, node("Sub", ["r", "s"], ["y"])),
        nodes(
            node("Sigmoid", ["x"], ["a"]),
            node("Relu", ["x"], ["b"]),
            node("Sub", ["b", "a"], ["y"]),
        ),
    ],
}


@pytest.mark.extension("onnx")
@pytest.mark.parametrize("name", [*DIFFERENT_FILES, *SAME_FILES])
def test_only_equivalent_files_have_equal_hashes(tmp_path, name):
    files = {**DIFFERENT_FILES, **SAME_FILES}[name]
    first, second = (save(tmp_path / "m.onnx", **file) for file in files)
    assert (first == second) == (name in SAME_FILES)


DIFFERENT_MODULES = {
    "dilation": [torch.nn.Conv2d(3, 3, 3, dilation=d, padding=d) for d in (1, 2)],
    "a number first": [Function(lambda _, x: x - 1), Function(lambda _, x: 1 - x)],
    "branches": [
        Function(lambda _, x: x.relu() - x.sigmoid()),
        Function(lambda _, x: x.sigmoid() - x.relu()),
    ],
    "axis": [torch.nn.Softmax(axis) for axis in (1, 3)],
}


@pytest.mark.extension("onnx")
@pytest.mark.parametrize("modules", DIFFERENT_MODULES.values(), ids=DIFFERENT_MODULES)
def test_hashes_of_modules_and_files_agree(tmp_path, modules):
    hashes = [graph_of(module, 8).content_hash for module in modules]
    assert hashes[0] != hashes[1]
    for module, known in zip(modules, hashes, strict=True):
        export_onnx(module.eval(), 8, tmp_path / "m.onnx")
        assert file_graph(tmp_path / "m.onnx").content_hash == known


def test_half_precision_changes_the_hash_of_a_module():
    half, relu = Sample((3, 8, 8), torch.float16), torch.nn.ReLU()
    assert graph_of(relu, half).content_hash != graph_of(relu, 8).content_hash
