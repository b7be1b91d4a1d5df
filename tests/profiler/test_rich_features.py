"""The rich features by hand, and the bytes that autograd keeps against a real training step."""

import numpy as np
import pytest
import torch
from torch import nn

from profiler import zoo
from profiler.errors import InputError, UnsupportedModelError
from profiler.module_graph import module_template
from profiler.rich_features import RICH_FEATURES, critical_path_nodes, rich_features
from profiler.saved_bytes import saved_bytes


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


def kept_on_the_cpu(model, images):
    """Bytes of all storages that a real forward pass keeps, weights and buffers aside."""
    present = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in present and storage.nbytes():
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = model(images)
    assert result.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("architecture", ["test_resnet", "test_efficientnet", "test_convnext"])
def test_saved_bytes_are_those_of_a_real_step_at_a_batch_size_never_traced(architecture):
    model = zoo.create_model(architecture, 32).train()
    assert saved_bytes(architecture, 32).at(7) == kept_on_the_cpu(model, torch.rand(7, 3, 32, 32))


class Attention(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.qkv = nn.Conv2d(3, 3 * size, 1)
        self.size = size

    def forward(self, x):
        q, k, v = (t[:, None] for t in self.qkv(x).flatten(2).transpose(1, 2).chunk(3, -1))
        return nn.functional.scaled_dot_product_attention(q, k, v)


def test_fused_attention_keeps_no_scores():
    pixels, size = 16 * 16, 8
    images, qkv, result, normaliser = (4 * pixels * width for width in (3, 3 * size, size, 1))
    saved = saved_bytes(Attention(size), 16)
    assert saved.constant == 0
    assert saved.slope == images + qkv + result + normaliser
    assert saved_bytes(Attention(3), 16).slope > 4 * pixels * pixels  # no kernel for three


def test_what_is_kept_grows_with_the_batch_only_where_it_should():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(3))

        def forward(self, x):
            return x * self.weight.exp()[:, None, None]

    saved = saved_bytes(Weighted(), 4)
    assert saved.constant == 4 * 3  # the exponential
    assert saved.slope == 4 * 3 * 16  # the images


def test_models_that_cannot_train_without_values_are_refused():
    class Picky(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(UnsupportedModelError, match="Picky does not train without values"):
        saved_bytes(Picky(), 4)
    with pytest.raises(InputError, match="input size is 0"):
        saved_bytes("resnet18", 0)


def test_rich_features_are_finite_for_a_graph_of_one_node():
    graph = module_template(nn.ReLU(), 4).at(1)
    assert np.isfinite(rich_features(graph)).all()
    assert critical_path_nodes(graph) == 1
