"""One model by several exporters, opsets and ways to keep its weights: the counts are the same.

The two files in `data` are of PyTorch's exporter of today (`dynamo=True`), which takes long; the
slow tests make them again.
"""

from collections import Counter
from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto
from onnx_export import export_onnx, export_quietly, file_graph
from small_modules import Function
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from trappm.profiler.errors import InputError, ModelFileError, UnsupportedModelError
from trappm.profiler.graphs.features import OPERATORS, node_features
from trappm.profiler.graphs.nodes import CONVOLUTIONS, PRODUCTS
from trappm.profiler.records import Phase
from trappm.profiler.trace import trace

DATA = Path(__file__).with_name("data")


class Small(nn.Module):
    """What opsets after 17 brought operators for, and a buffer that is no parameter."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.group_norm = nn.GroupNorm(2, 8)
        self.layer_norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, 5)
        self.register_buffer("scale", torch.arange(8.0).reshape(8, 1, 1))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():  # the exporter merges what is equal
            nn.init.normal_(parameter, generator=generator)

    def forward(self, x):
        x = functional.hardswish(self.group_norm(self.conv(x))) * self.scale
        x = self.layer_norm(x.flatten(2).transpose(1, 2))
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        x = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(functional.gelu(functional.mish(functional.silu(x))).mean(1))


def layers():
    pooled = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), *pooled).eval()


@pytest.mark.parametrize("opset", [11, 18])
def test_the_older_exporter_gives_the_same_graph_at_every_opset(tmp_path, opset):
    module = layers()
    export_onnx(module, 8, tmp_path / "ours.onnx")
    export_quietly(
        module, (torch.zeros(1, 3, 8, 8),), tmp_path / "m.onnx", dynamo=False,
        opset_version=opset, input_names=["x"], dynamic_axes={"x": {0: "n"}},
        do_constant_folding=False, training=torch.onnx.TrainingMode.PRESERVE,
        keep_initializers_as_inputs=True,
    )  # fmt: skip
    assert onnx.load(tmp_path / "m.onnx").opset_import[0].version == opset
    theirs, ours = file_graph(tmp_path / "m.onnx"), file_graph(tmp_path / "ours.onnx")
    assert theirs.content_hash == ours.content_hash


def saved(proto, path, place):
    """The same model with its weights inside, in a second file, lost, or left out."""
    options = {"save_as_external_data": True, "location": "w.bin", "size_threshold": 0}
    onnx.save(proto, path, **(options if place in ("outside", "lost") else {}))
    if place == "lost":  # but not the shapes, which are small integers
        model = onnx.load(path, load_external_data=False)
        whole = {tensor.name: tensor for tensor in onnx.load(path).graph.initializer}
        for tensor in model.graph.initializer:
            if tensor.data_type == TensorProto.INT64:
                tensor.CopyFrom(whole[tensor.name])
        path.write_bytes(model.SerializeToString())
        path.with_name("w.bin").unlink()
    return path


@pytest.mark.parametrize(
    ("opset", "batch", "place"),
    [(18, None, "inside"), (23, None, "lost"), (23, 3, "outside")],
)
def test_a_file_of_todays_exporter_counts_as_the_module_does(tmp_path, opset, batch, place):
    proto = onnx.load(DATA / f"dynamo_opset{opset}.onnx")
    if batch is not None:
        proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = batch
    template = file_graph(saved(proto, tmp_path / "m.onnx", place))
    assert template.fixed_batch_size == batch
    graph = template.at(3)
    macs, parameters = reference(Small(), torch.zeros(3, 3, 8, 8))
    assert linear_macs(graph) == macs
    # Before opset 21 group norm is written with instance norm, whose scale and shift are constants
    # (two of each) as the weights are, and so is one number: the file does not tell them apart.
    assert graph.parameters.sum() == parameters + (5 if opset == 18 else 0)
    assert "Other" not in node_operators(graph)
    more = Counter(template.operators) - Counter(graph_of(Small(), 8).operators)
    # It slices where the module splits; of a group norm in pieces its scales are not known.
    assert set(more) <= {"Slice"} | ({"Reshape"} if opset == 18 else set())


def graph_of(module, inputs):
    return trace(module, inputs, phase=Phase.INFER).graph


def node_operators(graph):
    """The operators by their places in the features."""
    return {OPERATORS[place] for place in node_features(graph)[:, : len(OPERATORS)].argmax(axis=1)}


def reference(model, images):
    """MACs by PyTorch's own counter, and the number of parameters."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(images)
    return counter.get_total_flops() // 2, sum(p.numel() for p in model.parameters())


def linear_macs(graph):
    pairs = zip(graph.macs.tolist(), graph.operators, strict=True)
    return sum(macs for macs, operator in pairs if operator in CONVOLUTIONS | PRODUCTS)


def test_a_shared_weight_counts_at_its_first_use(tmp_path):
    """One convolution used twice, and a weight that is rearranged before its use."""
    shared = Function(
        lambda self, x: self.conv(torch.relu(self.conv(x))) * self.scale.view(1, 3, 1, 1),
        conv=nn.Conv2d(3, 3, 3, padding=1, bias=False),
        scale=nn.Parameter(torch.rand(3)),
    )
    export_onnx(shared, 8, tmp_path / "m.onnx")
    graph = file_graph(tmp_path / "m.onnx").at(1)
    assert graph.operators == ("Conv", "Relu", "Conv", "Mul")
    assert graph.parameters.tolist() == [81, 0, 0, 3]


def test_a_batch_size_that_is_written_into_the_model_is_noticed(tmp_path):
    export_onnx(Function(lambda _, x: x.reshape(1, -1, 3)), 8, tmp_path / "m.onnx")
    with pytest.raises(UnsupportedModelError, match="batch size is written into the model"):
        file_graph(tmp_path / "m.onnx")


def test_an_open_image_size_is_asked_for(tmp_path):
    value = onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node("Relu", ["x"], ["y"])
    graph = onnx.helper.make_graph(
        [node], "g", [value("x", 1, ["n", 3, "h", "w"])], [value("y", 1, ["n", 3, "h", "w"])]
    )
    onnx.save(onnx.helper.make_model(graph), tmp_path / "m.onnx")
    with pytest.raises(ModelFileError, match="give an input size"):
        file_graph(tmp_path / "m.onnx")
    assert file_graph(tmp_path / "m.onnx", input_size=32).at(2).macs.tolist() == [2 * 3 * 32 * 32]
    export_onnx("test_resnet", 64, tmp_path / "fixed.onnx")
    with pytest.raises(InputError, match="not 96 px"):
        file_graph(tmp_path / "fixed.onnx", input_size=96)
