"""Files of exporters that fold batch norms into convolutions: training them costs what it costs."""

import onnx
import pytest
import torch
from onnx_export import export_quietly
from torch import nn

from trappm.extensions.onnx.file_trace import file_trace
from trappm.profiler.memory.simulation import memory_of
from trappm.profiler.models import zoo
from trappm.profiler.trace import trace


def trained(name, size):
    """With weights and statistics as training leaves them: of no two the same, none zero."""
    model = zoo.create_model(name, size).eval()
    generator = torch.Generator().manual_seed(0)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data.uniform_(0.5, 1.5, generator=generator)
    return model


def older(model, size, path, **options):
    """By the exporter that works without onnxscript; it folds, too."""
    axes = {"input_names": ["x"], "dynamic_axes": {"x": {0: "n"}}}
    return export_quietly(
        model, (torch.zeros(2, 3, size, size),), path, dynamo=False, **axes, **options
    )


def operators(path):
    return [node.op_type for node in onnx.load(path).graph.node]


@pytest.mark.parametrize(
    "name",
    ["test_resnet", "resnetv2_50", "test_vit"],
)
def test_a_folded_file_is_the_graph_and_the_step_of_its_model(tmp_path, name):
    size = 64
    own = trace(name, size)
    path = older(trained(name, size), size, tmp_path / "folded.onnx")
    norms = own.graph.operators.count("BatchNormalization")
    folded = norms - operators(path).count("BatchNormalization")
    file = file_trace(path)
    assert file.graph.operators.count("BatchNormalization") == norms
    assert memory_of(file, 32).live_mib == pytest.approx(memory_of(own, 32).live_mib, rel=0.02)
    if folded > 0:
        assert f"{folded} batch norms" in file.remark
    else:
        assert norms == 0
        assert "put back" not in (file.remark or "")


def plain_classifier():
    """As VGG is: trained with norms by some, without them by others."""
    layers = [nn.Conv2d(3 if i == 0 else 8, 8, 3) for i in range(4)]
    pairs = [part for layer in layers for part in (layer, nn.ReLU())]
    return nn.Sequential(*pairs, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def test_where_it_is_not_clear_nothing_is_put_back_and_the_answer_says_what_to_do(tmp_path):
    file = file_trace(older(plain_classifier().eval(), 32, tmp_path / "m.onnx"))
    assert "BatchNormalization" not in file.graph.operators
    assert "dynamo=True, optimize=False" in file.remark
    assert "dynamo=False, do_constant_folding=False" in file.remark


def test_the_older_exporter_keeps_norms_by_the_option_that_the_remark_names(tmp_path):
    own = memory_of(trace("test_resnet", 64), 32).live_mib
    for way, options in {
        "folded": {"optimize": False},
        "kept": {"do_constant_folding": False},
    }.items():
        path = older(trained("test_resnet", 64), 64, tmp_path / f"{way}.onnx", **options)
        assert ("BatchNormalization" in operators(path)) == (way == "kept"), way
        file = file_trace(path)
        assert memory_of(file, 32).live_mib == pytest.approx(own, rel=0.02), way
        assert (file.remark is None) == (way == "kept"), way


@pytest.mark.slow
def test_todays_exporter_folds_unless_told_not_to_optimise(tmp_path):
    """What the remark says to do is what works."""
    own = memory_of(trace("test_resnet", 64), 32).live_mib
    ways = {
        "default": {},
        "as asked": {"training": torch.onnx.TrainingMode.PRESERVE, "do_constant_folding": False},
        "whole": {"optimize": False},
    }
    for way, options in ways.items():
        path = tmp_path / f"{way}.onnx"
        export_quietly(
            trained("test_resnet", 64), (torch.zeros(2, 3, 64, 64),), path, dynamo=True, **options,
            dynamic_shapes=({0: torch.export.Dim("n")},),
        )  # fmt: skip
        assert ("BatchNormalization" in operators(path)) == (way == "whole"), way
        file = file_trace(path)
        assert memory_of(file, 32).live_mib == pytest.approx(own, rel=0.02), way
        assert (file.remark is None) == (way == "whole"), way
