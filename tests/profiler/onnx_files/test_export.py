import math
import warnings

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from onnx_export import export_onnx
from torch import nn

from trappm.profiler.errors import InputError, UnknownArchitectureError, UnsupportedModelError
from trappm.profiler.models import zoo


def stored(path):
    proto = onnx.load(path)
    onnx.checker.check_model(proto)
    return proto


def test_a_file_has_every_weight_as_an_input_and_none_inside(tmp_path):
    export_onnx("test_resnet", 64, tmp_path / "m.onnx")
    proto = stored(tmp_path / "m.onnx")
    model = zoo.create_model("test_resnet", 64)
    inputs = {
        i.name: math.prod(d.dim_value for d in i.type.tensor_type.shape.dim)
        for i in proto.graph.input
    }
    # All BatchNormalization weights are equal in a fresh model: none may be merged.
    assert {n: inputs[n] for n, _ in model.named_parameters()} == {
        n: p.numel() for n, p in model.named_parameters()
    }
    assert not proto.graph.initializer
    assert (tmp_path / "m.onnx").stat().st_size < 100_000
    assert {o.domain: o.version for o in proto.opset_import}[""] == 17


def test_the_batch_axis_is_open_or_fixed_as_asked(tmp_path):
    for batch_size, expected in ((None, "batch"), (3, 3)):
        export_onnx("test_resnet", 64, tmp_path / "m.onnx", batch_size=batch_size)
        axis = stored(tmp_path / "m.onnx").graph.input[0].type.tensor_type.shape.dim[0]
        assert (axis.dim_param or axis.dim_value) == expected


def test_exporting_is_quiet(tmp_path, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export_onnx("test_vit", 32, tmp_path / "m.onnx")
    assert capfd.readouterr() == ("", "")


def test_a_module_stays_as_it_was(tmp_path):
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten()).train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    export_onnx(module, 8, tmp_path / "m.onnx")
    assert all(m.training for m in module.modules())
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


@pytest.mark.parametrize(("input_size", "output_size"), [(2, 7), (10, 7), (14, 7), (5, 1)])
def test_adaptive_pooling_computes_what_torch_computes(tmp_path, input_size, output_size):
    module = nn.AdaptiveAvgPool2d(output_size)
    export_onnx(module, input_size, tmp_path / "m.onnx")
    images = torch.rand(2, 3, input_size, input_size)
    (result,) = ReferenceEvaluator(stored(tmp_path / "m.onnx")).run(None, {"image": images.numpy()})
    np.testing.assert_allclose(result, module(images).numpy(), rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"eps": 0.1}, {"elementwise_affine": False}])
def test_rms_norm_computes_what_torch_computes(tmp_path, options):
    module = nn.RMSNorm((4, 5), **options)
    export_onnx(nn.Sequential(nn.Upsample((4, 5)), module), 2, tmp_path / "m.onnx")
    images = torch.rand(2, 3, 2, 2)
    weights = {i.name: np.ones((4, 5), np.float32) for i in stored(tmp_path / "m.onnx").graph.input}
    evaluator = ReferenceEvaluator(stored(tmp_path / "m.onnx"))
    (result,) = evaluator.run(None, {**weights, "image": images.numpy()})
    expected = module(nn.functional.interpolate(images, (4, 5)))
    np.testing.assert_allclose(result, expected.detach().numpy(), rtol=1e-4)


class Unheard(nn.Module):
    def forward(self, x):
        return torch.linalg.svd(x).S


def test_a_failure_is_told_and_not_printed(tmp_path, capfd):
    with pytest.raises(UnsupportedModelError, match="linalg_svd"):
        export_onnx(Unheard(), 8, tmp_path / "m.onnx")
    assert capfd.readouterr() == ("", "")


def test_a_model_that_cannot_run_at_this_size_is_refused_in_one_line(tmp_path):
    for model in ("test_vit", nn.Conv2d(3, 4, 9)):
        with pytest.raises(UnsupportedModelError, match="cannot be exported at 8 px") as caught:
            export_onnx(model, 8, tmp_path / "m.onnx")
        assert "\n" not in str(caught.value)
        assert caught.value.__cause__ is not None
    assert not (tmp_path / "m.onnx").exists()


def test_bad_requests_are_refused(tmp_path):
    with pytest.raises(UnknownArchitectureError, match="test_resnet"):
        export_onnx("test_resnett", 64, tmp_path / "m.onnx")
    for input_size, batch_size in ((0, None), (64, 0)):
        with pytest.raises(InputError):
            export_onnx("test_resnet", input_size, tmp_path / "m.onnx", batch_size=batch_size)
