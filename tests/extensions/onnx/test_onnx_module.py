"""A module rebuilt from an ONNX file has the training step of the module that was exported."""

import contextlib

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from onnx_export import export_onnx
from small_modules import Function
from torch import nn
from torch.nn import functional as F  # noqa: N812  # the usual name

from trappm.extensions.onnx.checked_model import load_checked
from trappm.extensions.onnx.module import RebuiltModule
from trappm.profiler.memory.simulation import memory_of
from trappm.profiler.models.model_input import Sample
from trappm.profiler.trace import trace


def rebuilt(path):
    return RebuiltModule(load_checked(path))


@pytest.mark.parametrize(
    ("architecture", "input_size"),
    [
        ("test_resnet", 64),
        ("test_vit", 64),
        ("test_efficientnet_gn", 64),
        ("convnext_zepto_rms", 32),
    ],
)
def test_the_rebuilt_step_is_that_of_the_original(tmp_path, architecture, input_size):
    export_onnx(architecture, input_size, tmp_path / "m.onnx")
    original = trace(architecture, input_size)
    again = trace(rebuilt(tmp_path / "m.onnx"), input_size)
    assert again.kernels.parameters == original.kernels.parameters
    for batch_size in (1, 16, 100):
        ours, theirs = (p.saved_bytes.at(batch_size) for p in (again, original))
        assert ours == pytest.approx(theirs, rel=1e-3)
        assert memory_of(again, batch_size).live_mib == pytest.approx(
            memory_of(original, batch_size).live_mib, rel=0.02
        )


def exported(tmp_path, module, example, opset, **options):
    path = tmp_path / "m.onnx"
    with contextlib.redirect_stdout(None):
        torch.onnx.export(
            module, (example,), path, dynamo=False, opset_version=opset, input_names=["image"],
            dynamic_axes={"image": {0: "batch"}, "out": {0: "batch"}}, output_names=["out"],
            **options,
        )  # fmt: skip
    return path


def classifier(body):
    return Function(
        lambda self, x: self.last(body(self, self.first(x)).mean((2, 3))),
        first=nn.Conv2d(3, 8, 1), norm=nn.LayerNorm(8), groups=nn.GroupNorm(2, 8),
        last=nn.Linear(8, 4),
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # of the exporter, about its own future
@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize(
    ("body", "operator"),
    [
        (lambda _, x: F.gelu(x), "Gelu"),
        (lambda _, x: F.gelu(x, approximate="tanh"), "Gelu"),
        (lambda _, x: 0.5 * x * (1 + torch.erf(x / 2**0.5)), "Gelu"),
        (lambda _, x: F.silu(x), "trappm.Silu"),
        (lambda _, x: F.hardswish(x), "HardSwish"),
        (lambda _, x: x * F.relu6(x + 3) / 6, "HardSwish"),
        (lambda m, x: m.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), "LayerNormalization"),
        (lambda m, x: m.groups(x), "GroupNormalization"),
    ],
)
def test_what_an_exporter_takes_apart_is_put_together(tmp_path, body, operator, opset):
    path = exported(tmp_path, classifier(body), torch.zeros(1, 3, 8, 8), opset)
    assert operator in rebuilt(path).operators
    assert not {"Erf", "Tanh", "InstanceNormalization", "Sigmoid"} & rebuilt(path).operators


def test_products_that_only_look_like_an_activation_stay_apart(tmp_path):
    gate = classifier(lambda _, x: x.roll(1, 1) * torch.sigmoid(x))
    operators = rebuilt(exported(tmp_path, gate, torch.zeros(1, 3, 8, 8), 17)).operators
    assert {"Sigmoid", "Mul"} <= operators
    assert "trappm.Silu" not in operators


class Attention(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.fused = fused
        self.qkv = nn.Linear(64, 192)
        self.head = nn.Linear(64, 4)

    def forward(self, x):
        x = x.flatten(2)
        q, k, v = self.qkv(x).reshape(-1, 3, 3, 4, 16).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            x = F.scaled_dot_product_attention(q, k, v)
        else:
            x = ((q * 0.25) @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.head(x.transpose(1, 2).flatten(2).mean(1))


@pytest.mark.parametrize("fused", [True, False])
def test_attention_is_fused_where_the_exported_module_fuses_it(tmp_path, fused):
    module = Attention(fused)
    path = exported(tmp_path, module, torch.zeros(2, 3, 8, 8), 17)
    again = rebuilt(path)
    assert ("trappm.ScaledAttention" in again.operators) == fused
    assert ("Softmax" in again.operators) != fused
    assert (
        trace(again, 8).saved_bytes == trace(module, Sample((3, 8, 8), torch.float32)).saved_bytes
    )


def test_weights_may_be_stored_or_folded(tmp_path):
    """As weights of a file, or transposed beforehand by the exporter."""
    module = Attention(fused=True).eval()
    expected = trace(module, Sample((3, 8, 8), torch.float32))
    for options in ({}, {"do_constant_folding": False}):
        path = exported(tmp_path, module, torch.zeros(2, 3, 8, 8), 17, **options)
        actual = trace(rebuilt(path), 8)
        assert actual.kernels.parameters == expected.kernels.parameters
        assert memory_of(actual, 16) == memory_of(expected, 16)


def test_half_precision_files_are_trained_in_full_precision(tmp_path):
    module = Attention(fused=False)
    path = exported(tmp_path, module, torch.zeros(2, 3, 8, 8), 17)
    expected = trace(rebuilt(path), 8).saved_bytes
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            values = onnx.numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.t.data_type == TensorProto.FLOAT:
                values = onnx.numpy_helper.to_array(attribute.t).astype(np.float16)
                attribute.t.CopyFrom(onnx.numpy_helper.from_array(values))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    onnx.save(model, path)
    assert trace(rebuilt(path), 8).saved_bytes == expected
