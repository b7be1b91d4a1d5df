"""Files whose inputs are no images: traced by the file's own signature, or refused in one line."""

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from onnx import TensorProto, helper, numpy_helper
from onnx_export import export_quietly
from small_modules import Function, Parts
from torch import nn

import trappm
from trappm.extensions.onnx.file_trace import file_trace, rebuild
from trappm.profiler.errors import TrappmError, UnsupportedModelError
from trappm.profiler.memory.simulation import memory_of
from trappm.profiler.models.model_input import ExampleInputs
from trappm.profiler.trace import trace

pytestmark = pytest.mark.usefixtures("module_home")
NAMES = ["input_ids", "attention_mask"]
AXES = {name: {0: "batch", 1: "sequence"} for name in NAMES}


class Bert(nn.Module):
    """A text encoder with a mask, written out as exporters get it."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(100, 32), nn.Embedding(64, 32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.norm, self.pooler = nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, input_ids, attention_mask):
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.norm(self.words(input_ids) + self.places(places))
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        hidden = (1.0 - attention_mask[:, None, None].float()) * -1e4
        scores = (q @ k.transpose(-1, -2) / 4.0 + hidden).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).flatten(2))
        return x, torch.tanh(self.pooler(x[:, 0]))


def recurrent(layer, batch_first=False):
    """A language model of recurrent layers."""
    return Function(
        lambda self, words: self.head(self.layers(self.words(words))[0]),
        words=nn.Embedding(100, 16), head=nn.Linear(64, 100),
        layers=layer(16, 32, 2, bidirectional=True, batch_first=batch_first),
    )  # fmt: skip


class WithFacts(Parts):
    """A picture and a vector of facts."""

    def forward(self, image, facts):
        return self.head(F.relu(self.layer(image)).mean((2, 3)) + self.facts(facts))


def exported(tmp_path, module, example, names, axes):
    return export_quietly(
        module.eval(), example, tmp_path / "m.onnx", dynamo=False, opset_version=17,
        input_names=names, dynamic_axes=axes,
    )  # fmt: skip


def tokens(batch_size=2, length=12):
    return torch.randint(100, (batch_size, length))


def bert(tmp_path, axes):
    return exported(tmp_path, Bert(), (tokens(), torch.ones(2, 12).long()), NAMES, axes)


def value(name, kind, sizes):
    return helper.make_tensor_value_info(name, kind, sizes)


def saved(tmp_path, nodes, inputs, weights=()):
    graph = helper.make_graph(nodes, "g", inputs, [value("y", TensorProto.FLOAT, None)], weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def weight(name, kind, *shape):
    data = np.zeros(shape, helper.tensor_dtype_to_np_dtype(kind))
    return helper.make_tensor(name, kind, shape, data.tobytes(), raw=True)


def equal_steps(path, module, inputs, size=None, rel=0.02):
    """Compare the step of a file with the step of its module."""
    ours = trace(*rebuild(path, size))
    theirs = trace(module, ExampleInputs.of(*inputs))
    assert ours.kernels.parameters == theirs.kernels.parameters
    for batch_size in (8, 64):
        assert memory_of(ours, batch_size).live_mib == pytest.approx(
            memory_of(theirs, batch_size).live_mib, rel=rel
        )


@pytest.mark.parametrize(
    "axes", [AXES, {name: [0, 1] for name in NAMES}], ids=["named axes", "axes without names"]
)
def test_a_text_model_is_predicted_at_a_sequence_length(tmp_path, axes):
    path = bert(tmp_path, axes)
    short, long = (
        trappm.predict(path, sequence_length=n, batch_size=8, device="a100") for n in (16, 64)
    )
    assert long.simulated_memory.live_mib > 2 * short.simulated_memory.live_mib
    assert (long.sequence_length, long.batch_size) == (64, 8)
    long_mask = torch.ones(2, 64).long()
    equal_steps(path, Bert(), (tokens(length=64), long_mask), 64, rel=0.1)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_recurrent_layers_are_those_of_the_module(tmp_path, layer):
    axes = {"words": {1: "batch"}}
    path = exported(tmp_path, recurrent(layer), (tokens(12, 2),), ["words"], axes)
    equal_steps(path, recurrent(layer, batch_first=True), (tokens(),), rel=0.1)


def test_two_inputs_are_those_of_the_module(tmp_path):
    axes = {"image": {0: "batch", 2: "height", 3: "width"}, "facts": {0: "batch"}}
    example = torch.rand(2, 3, 32, 32), torch.rand(2, 5)
    model = WithFacts(layer=nn.Conv2d(3, 8, 3), facts=nn.Linear(5, 8), head=nn.Linear(8, 2))
    path = exported(tmp_path, model, example, ["image", "facts"], axes)
    equal_steps(path, model, example, 32)


def test_a_recurrent_file_with_time_first_has_its_batch_behind(tmp_path):
    nodes = [helper.make_node("LSTM", ["x", "w", "r"], ["y"], hidden_size=4)]
    weights = [weight("w", TensorProto.FLOAT, 1, 16, 8), weight("r", TensorProto.FLOAT, 1, 16, 4)]
    fixed = saved(tmp_path, nodes, [value("x", TensorProto.FLOAT, [10, 3, 8])], weights)
    assert file_trace(fixed).graph.fixed_batch_size == 3
    opened = saved(tmp_path, nodes, [value("x", TensorProto.FLOAT, [None, None, 8])], weights)
    shapes = rebuild(opened, 10, is_tokens=True)[1].shapes
    assert shapes == ((10, None, 8),)


@pytest.mark.parametrize("sizes", [["N", 8], ["N", 3, 4, 8, 8]])
def test_vectors_series_and_volumes_are_predicted(tmp_path, sizes):
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    weights = [weight("w", TensorProto.FLOAT, sizes[-1], 4)]
    path = saved(tmp_path, nodes, [value("x", TensorProto.FLOAT, sizes)], weights)
    assert trappm.predict(path, batch_size=64, device="a100").step_time_ms > 0


FLOAT, WORDS = TensorProto.FLOAT, TensorProto.INT64


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ([("x", FLOAT, None)], {}, "'x' has no shape; export the model with the shapes"),
        ([("x", WORDS, ["N", "length"])], {}, r"'x' open \(N, length\); give a sequence length"),
        ([("x", FLOAT, ["N", 3, "h", "w"])], {"sequence_length": 9}, "not 9 tokens"),
        (
            [("x", WORDS, ["N", 1]), ("past_key_values.0.key", FLOAT, ["N", 2, "past", 8])],
            {},
            r"takes the cache of earlier tokens \(past_key_values.0.key\)",
        ),
        ([("x", FLOAT, [])], {}, "no input of .* has a batch axis"),
    ],
)
def test_what_cannot_be_traced_is_refused_in_one_line(tmp_path, inputs, options, message):
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    path = saved(tmp_path, nodes, [value(*entry) for entry in inputs])
    with pytest.raises(TrappmError, match=message) as refused:
        trappm.predict(path, device="a100", **options)
    assert "\n" not in str(refused.value)


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
def test_quantized_files_are_not_trained_and_their_weights_count(design, tmp_path):
    nodes = [*DESIGNS[design], node("Flatten", ["c"], ["y"])]
    path = saved(tmp_path, nodes, [value("x", FLOAT, ["n", 3, 32, 32])], [*SCALES, WEIGHT])
    assert file_trace(path).graph.at(4).parameters.sum() == 16 * 3 * 3 * 3
    with pytest.raises(UnsupportedModelError, match=r"is quantized .* phase infer"):
        trappm.predict(path, device="a100", batch_size=4)
    answer = trappm.predict(path, device="rtx4090", batch_size=4, phase="infer")
    assert "cannot be rebuilt" in answer.missing["step_time_ms"]
