"""The rich features, counted by hand."""

import numpy as np
import pytest
import torch
from torch import nn

from trappm.profiler.graphs.module_graph import module_template
from trappm.profiler.graphs.rich_features import (
    MAC_CLASSES,
    RICH_FEATURES,
    STEP_FEATURES,
    critical_path_nodes,
    rich_features,
)
from trappm.profiler.models.model_input import Sample
from trappm.profiler.models.zoo import create_model
from trappm.profiler.static_profile import static_profile


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
        "pointwise_convolution_macs": 3 * pixels,
        "dense_convolution_macs": 0,
        "grouped_convolution_macs": 0,
        "depthwise_convolution_macs": 0,
        "matrix_product_macs": 2 * 4 * 2,
        "attention_macs": 0,
        "other_macs": 4 * pixels,
        "critical_path_nodes": 6,
        "parameters": 22,
    }


def test_a_step_adds_what_autograd_keeps_and_what_is_trained():
    module = Branches()
    module.conv.weight.requires_grad_(False)
    sample = Sample((3, 5, 5), torch.float32)
    profile = static_profile(module, sample)
    graph = profile.graph.at(7)
    found = rich_features(graph, profile.step)
    assert found[: len(RICH_FEATURES)].tolist() == rich_features(graph).tolist()
    step = dict(zip(STEP_FEATURES, found[len(RICH_FEATURES) :].tolist(), strict=True))
    means = 7 * 4
    # the head is all that is trained
    assert step == {"saved_bytes": 4 * means, "trainable_parameters": 10, "frozen_parameters": 12}


def macs_by_hooks(architecture):
    """MACs of the classes of convolutions at batch 1, from the modules' own kernels and groups."""
    found = dict.fromkeys(MAC_CLASSES, 0)

    def add(module, _, output):
        per_result = module.weight[0].numel()
        if module.groups == module.in_channels > 1:
            kind = "depthwise"
        elif module.groups > 1:
            kind = "grouped"
        else:
            kind = "pointwise" if module.kernel_size == (1, 1) else "dense"
        found[f"{kind}_convolution"] += output.numel() * per_result

    with torch.device("meta"):
        model = create_model(architecture, 64).eval()
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.register_forward_hook(add)
        model(torch.empty(1, 3, 64, 64))
    return found


@pytest.mark.parametrize(
    "architecture", ["resnext26ts", "test_efficientnet", "inception_next_atto"]
)
def test_convolutions_are_told_apart_by_shapes_and_macs(architecture):
    graph = module_template(architecture, 64).at(1)
    features = dict(zip(RICH_FEATURES, rich_features(graph).tolist(), strict=True))
    expected = macs_by_hooks(architecture)
    for name in (n for n in MAC_CLASSES if n.endswith("convolution")):
        assert features[f"{name}_macs"] == expected[name]


def test_features_of_a_real_model_add_up():
    graph = module_template("test_vit", 64).at(3)
    features = dict(zip(RICH_FEATURES, rich_features(graph).tolist(), strict=True))
    assert sum(features[f"{name}_macs"] for name in MAC_CLASSES) == graph.macs.sum()
    model = create_model("test_vit", 64)
    tokens, width = 17, model.embed_dim
    # scores and their sums of values
    assert features["attention_macs"] == 2 * 3 * len(model.blocks) * tokens**2 * width
    assert 1 < critical_path_nodes(graph) < graph.node_count
    assert features["parameters"] == graph.parameters.sum()


def test_rich_features_are_finite_for_a_graph_of_one_node():
    graph = module_template(nn.ReLU(), 4).at(1)
    assert np.isfinite(rich_features(graph)).all()
    assert critical_path_nodes(graph) == 1
