"""A model run without weights gives the graph that its ONNX file gives, for every batch size."""

import collections
import functools
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_export import export_onnx, file_graph
from small_modules import Function
from torch import nn
from traced_steps import graph_of

from trappm.profiler.errors import UnsupportedModelError
from trappm.profiler.models.model_input import Sample
from trappm.profiler.models.on_meta import on_meta
from trappm.profiler.records import Phase
from trappm.profiler.tracing.tracer import Tracer

COLUMNS = ("edges", "input_shapes", "output_shapes", "macs", "parameters", "memory_bytes")

SLOW = (
    ("convnext_zepto_rms", 32), ("test_efficientnet_gn", 64), ("test_vit3", 64),
    ("swin_tiny_patch4_window7_224", 64), ("efficientvit_b0", 64), ("densenetblur121d", 32),
    ("semnasnet_050", 32), ("poolformerv2_s12", 32), ("swinv2_tiny_window8_256", 64),
)  # fmt: skip
SAME_BY_BOTH_WAYS = (
    ("test_convnext", 64), ("test_efficientnet", 64), ("mobilenetv3_small_050", 64),
    ("resnet14t", 32), ("visformer_tiny", 32), ("test_vit4", 64),
    *(pytest.param(*model, marks=pytest.mark.slow) for model in SLOW),
)  # fmt: skip
"""Models of the laptop pool's families: the graph of the file, node for node."""

TINY = ("test_efficientnet_ln", "test_resnet", "test_vit4")


def from_file(architecture, input_size, folder, batch_size=None):
    export_onnx(architecture, input_size, folder / "m.onnx")
    return file_graph(folder / "m.onnx", batch_size=batch_size)


@pytest.mark.extension("onnx")
@pytest.mark.parametrize(("architecture", "input_size"), SAME_BY_BOTH_WAYS)
def test_graphs_of_architectures_and_onnx_files_agree(tmp_path, architecture, input_size):
    graph = graph_of(architecture, input_size)
    file = from_file(architecture, input_size, tmp_path)
    assert graph.operators == file.operators
    for name in COLUMNS:
        assert np.array_equal(getattr(graph.at(7), name), getattr(file.at(7), name)), name
    assert graph.content_hash == file.content_hash


_template = functools.cache(graph_of)


@settings(max_examples=6, deadline=None)
@given(st.sampled_from(TINY), st.sampled_from([32, 64, 96]), st.integers(1, 40))
def test_templates_agree_with_traces_at_every_batch_size(architecture, input_size, batch_size):
    module = on_meta(architecture, input_size).eval()
    inputs, sizes = Sample.of(input_size), (batch_size, batch_size)
    fresh = (
        Tracer(module, inputs, phase=Phase.INFER, batch_sizes=sizes).trace().graph.at(batch_size)
    )
    graph = _template(architecture, input_size).at(batch_size)
    assert graph.operators == fresh.operators
    for name in COLUMNS:
        assert np.array_equal(getattr(graph, name), getattr(fresh, name)), name


def test_custom_modules_are_traced_and_not_changed():
    """A shared layer, a weight that is reshaped before its use, buffers, an unused layer."""

    def body(self, x):
        x = self.norm(self.conv(torch.relu(self.conv(x))))
        return {"scores": (x * self.scale.view(1, 3, 1, 1)).mean((2, 3))}

    module = Function(
        body, conv=nn.Conv2d(3, 3, 3, padding=1, bias=False), scale=nn.Parameter(torch.rand(3)),
        norm=nn.BatchNorm2d(3), unused=nn.Linear(5, 5),
    ).train()  # fmt: skip
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    graph = graph_of(module, 8).at(4)
    assert graph.operators == ("Conv", "Relu", "Conv", "BatchNormalization", "Mul", "ReduceMean")
    assert graph.parameters.tolist() == [81, 0, 0, 6, 3, 0]
    assert graph.macs.tolist() == [4 * 64 * 81, 768, 4 * 64 * 81, 768, 768, 768]
    assert graph.output_shapes[-1].tolist() == [4, 3, 0, 0, 0, 0]
    assert module.training
    assert module.norm.training
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda _, x: x.reshape(1, -1), "batch size is written into the model"),
        (lambda _, x: x if x.sum() > 0 else -x, "needs the values of a tensor"),
        (lambda _, x: x[x > 0], "needs the values of a tensor"),
        (lambda _, x: x.flatten(1) @ x.flatten(1).T, "grow faster than the batch"),
        (lambda _, x: torch.ones_like(x), "no output"),
        (lambda _, x: x.flatten(1) @ torch.ones(3, 3, device="meta"), "cannot be traced"),
    ],
)
def test_untraceable_modules_are_refused_with_a_reason(body, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        graph_of(Function(body), 8)


def test_an_operator_in_no_table_is_a_node_of_its_own_name():
    graph = graph_of(Function(lambda _, x: torch.fft.rfft(torch.linalg.inv(x)).abs()), 8).at(2)
    assert graph.operators == ("LinalgInvEx", "FftR2c", "Abs")
    assert graph.edges.tolist() == [[0, 1], [1, 2]]


@pytest.mark.extension("onnx")
@pytest.mark.parametrize(
    ("kind", "settings"),
    [(nn.LSTM, {}), (nn.RNN, {"nonlinearity": "relu"})],
)
def test_recurrent_layers_are_single_nodes(kind, settings, tmp_path):
    """An image is read as a sequence of columns, as Sequencer does."""
    layers = kind(3, 5, num_layers=2, batch_first=True, bidirectional=True, **settings)
    model = Function(lambda self, x: self.layers(x.flatten(2).transpose(1, 2))[0], layers=layers)
    model.eval()
    file = tmp_path / "rows.onnx"
    images = (torch.randn(2, 3, 4, 4),)
    torch.onnx.export(
        model, images, file, dynamo=False, input_names=["x"], dynamic_axes={"x": {0: "batch"}}
    )
    template = graph_of(model, 4)
    assert template.content_hash == file_graph(file).content_hash
    assert collections.Counter(template.operators)[kind.__name__] == 2
    assert template.parameters.sum() == sum(p.numel() for p in model.parameters())


# Layers that timm has not.


EXPORTED = {
    "max 2d and places": lambda _, x: F.max_pool2d(x, 2, return_indices=True),
    "average 3d": lambda _, x: F.avg_pool3d(x.unsqueeze(2), (1, 4, 4), padding=(0, 2, 2)),
    "flip": lambda _, x: x.flip((2, 3)),
    "filled as a whole": lambda _, x: x + x.relu().fill_(2.0),
}


SLICES_MORE = {"max 2d and places": 1}
"""A Slice of the file that cuts two axes is two."""


@pytest.mark.extension("onnx")
@pytest.mark.parametrize("name", EXPORTED)
def test_graphs_of_modules_and_files_agree(tmp_path, name):
    module = Function(EXPORTED[name])
    export_onnx(module, 8, tmp_path / "m.onnx")
    file, graph = file_graph(tmp_path / "m.onnx"), graph_of(module, 8)
    if name in SLICES_MORE:
        more = Counter(file.operators) - Counter(graph.operators)
        assert more == {"Slice": SLICES_MORE[name]}
    else:
        assert graph.operators == file.operators
        assert graph.content_hash == file.content_hash
