"""Layers that timm has not: the graph of a module is that of its file, where it can be exported."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from onnx_export import export_onnx, file_graph
from torch import nn

from trappm.profiler.errors import UnsupportedModelError
from trappm.profiler.static_profile import graph_template


class Function(nn.Module):
    def __init__(self, body, layer=None):
        super().__init__()
        self.body, self.layer = body, layer

    def forward(self, x):
        return self.body(x) if self.layer is None else self.body(x, self.layer)


EXPORTED = {
    "max 1d": lambda x: F.max_pool1d(x.flatten(2), 3, padding=1),
    "max 2d and places": lambda x: F.max_pool2d(x, 2, return_indices=True),
    "max 3d and places": lambda x: F.max_pool3d(x.unsqueeze(2), (1, 2, 2), return_indices=True),
    "average 3d": lambda x: F.avg_pool3d(x.unsqueeze(2), (1, 4, 4), padding=(0, 2, 2)),
    "flip": lambda x: x.flip((2, 3)),
    "a tensor without a device": lambda x: x + torch.zeros(8),
    "filled as a whole": lambda x: x + x.relu().fill_(2.0),
}


SLICES_MORE = {"max 2d and places": 1, "max 3d and places": 1}
"""A Slice of the file that cuts two axes is two."""


@pytest.mark.parametrize("name", EXPORTED)
def test_graphs_of_modules_and_files_agree(tmp_path, name):
    module = Function(EXPORTED[name])
    export_onnx(module, 8, tmp_path / "m.onnx")
    file, graph = file_graph(tmp_path / "m.onnx"), graph_template(module, 8)
    if name in SLICES_MORE:
        more = Counter(file.operators) - Counter(graph.operators)
        assert more == {"Slice": SLICES_MORE[name]}
    else:
        assert graph.operators == file.operators
        assert graph.content_hash == file.content_hash


def test_filled_tensors_do_not_depend_on_their_old_values():
    def part(x):
        y = x.relu()
        y[:, 1:].zero_()
        return y

    def by_a_view(x):
        y = x.relu()
        y.flatten().fill_(2.0)
        return x + y

    assert graph_template(Function(by_a_view), 8).operators == ("Add",)
    assert graph_template(Function(part), 8).operators == ("Relu", "Slice", "ScatterND")
    with pytest.raises(UnsupportedModelError, match="no output"):
        graph_template(Function(lambda x: x.relu().zero_()), 8)


def test_bilinear_layers_are_counted_by_hand():
    module = Function(lambda x, layer: layer(x, x), nn.Bilinear(8, 8, 5))
    graph = graph_template(module, 8).at(2)
    assert graph.operators == ("Einsum", "Add")
    assert graph.parameters.tolist() == [5 * 8 * 8, 5]
    assert graph.macs.tolist() == [2 * 3 * 8 * 5 * 8 * 8, 2 * 3 * 8 * 5]


@pytest.mark.parametrize(
    ("mode", "last"), [("sum", "ReduceSum"), ("mean", "ReduceMean"), ("max", "ReduceMax")]
)
def test_embedding_bags_gather_and_reduce(mode, last):
    module = Function(lambda x, bag: bag(x.flatten(1).long()), nn.EmbeddingBag(10, 5, mode=mode))
    graph = graph_template(module, 8).at(2)
    assert graph.operators[-2:] == ("Gather", last)
    assert graph.parameters.sum() == 50
    assert graph.macs[-1] == 2 * 192 * 5
    assert graph.output_shapes[-1].tolist() == [2, 5, 0, 0, 0, 0]


def test_lazy_layers_must_be_initialized():
    module = nn.Sequential(nn.Flatten(), nn.LazyLinear(3))
    with pytest.raises(UnsupportedModelError, match=r"lazy layers.* run the module once"):
        graph_template(module, 8)
    module(torch.zeros(1, 3, 8, 8))
    assert graph_template(module, 8).parameters.sum() == 192 * 3 + 3
