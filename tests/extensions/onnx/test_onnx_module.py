"""A module rebuilt from an ONNX file has the training step of the module that was exported."""

import pytest
import torch
from onnx_export import export_onnx, export_quietly
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


def exported(tmp_path, module, example, opset):
    return export_quietly(
        module, (example,), tmp_path / "m.onnx", dynamo=False, opset_version=opset,
        input_names=["image"], output_names=["out"],
        dynamic_axes={"image": {0: "batch"}, "out": {0: "batch"}},
    )  # fmt: skip


def classifier(body):
    return Function(
        lambda self, x: self.last(body(self, self.first(x)).mean((2, 3))),
        first=nn.Conv2d(3, 8, 1), norm=nn.LayerNorm(8), groups=nn.GroupNorm(2, 8),
        last=nn.Linear(8, 4),
    )  # fmt: skip


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
