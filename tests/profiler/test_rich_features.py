"""The rich features, counted by hand."""

import numpy as np
from torch import nn

from profiler.module_graph import module_template
from profiler.rich_features import RICH_FEATURES, critical_path_nodes, rich_features


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1, bias=False)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = self.conv(x)
        return self.head((x + x.relu().tanh()).mean((2, 3)))


def test_rich_features_counted_by_hand():
    graph = module_template(Branches(), 5).at(2)
    assert graph.operators == ("Conv", "Relu", "Tanh", "Add", "ReduceMean", "Gemm")
    features = dict(zip(RICH_FEATURES, rich_features(graph).tolist(), strict=True))
    pixels = 2 * 4 * 25
    assert features == {
        "activation_bytes": 4 * (4 * pixels + 8 + 4),
        "largest_tensor_bytes": 4 * pixels,
        # written, weights, and read: the images, five edges of images, one of means
        "bytes_moved": 4 * ((4 * pixels + 12) + (12 + 10) + (2 * 3 * 25 + 5 * pixels + 8)),
        "convolution_macs": 3 * pixels,
        "product_macs": 2 * 4 * 2,
        "other_macs": 4 * pixels,
        "critical_path_nodes": 6,
        "parameters": 22,
    }


def test_features_of_a_real_model_add_up():
    graph = module_template("test_vit", 64).at(3)
    features = dict(zip(RICH_FEATURES, rich_features(graph).tolist(), strict=True))
    classes = ("convolution_macs", "product_macs", "other_macs")
    assert sum(features[name] for name in classes) == graph.macs.sum()
    assert 1 < critical_path_nodes(graph) < graph.node_count
    assert features["parameters"] == graph.parameters.sum()


def test_rich_features_are_finite_for_a_graph_of_one_node():
    graph = module_template(nn.ReLU(), 4).at(1)
    assert np.isfinite(rich_features(graph)).all()
    assert critical_path_nodes(graph) == 1
