"""The answer about a step depends on the step and not on how its model is given."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from snapshot_samples import shipped_heads
from torch import nn

import trappm
from trappm.learner.interface import Workload
from trappm.profiler.devices.catalogue import process_memory_mib
from trappm.profiler.records import Phase
from trappm.profiler.trace import trace

CARDS = ("a100", "h100", "v100", "rtx3090")
BATCH = 8
SETTINGS = {"precision": "fp32", "optimizer": "sgd"}
FIGURES = ("memory_mib", "step_time_ms", "largest_batch")


class Way(NamedTuple):
    """A model, and how `trappm.predict` gets it."""

    name: str | None
    make: Callable[[], nn.Module]
    sizes: tuple[int, ...] = (3, 224, 224)


def timm_model(name, pixels=224):
    def make():
        import timm

        return timm.create_model(name)

    return Way(name, make, (3, pixels, pixels))


def torchvision_model(name):
    def make():
        import torchvision

        return torchvision.models.get_model(name, weights=None)

    return Way(None, make)


class Logits(nn.Module):
    """A vision model of Transformers that returns its logits."""

    def __init__(self, config):
        super().__init__()
        import transformers

        self.body = transformers.AutoModelForImageClassification.from_config(config)

    def forward(self, pixels):
        return self.body(pixel_values=pixels).logits


def transformers_model(name, **sizes):
    def make():
        import transformers

        return Logits(getattr(transformers, name)(**sizes))

    return Way(None, make)


def small():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


FAST = {
    "test_resnet": timm_model("test_resnet", 160),
    "own convolutions": Way(None, small, (3, 64, 64)),
}
SLOW = {
    "test_vit": timm_model("test_vit", 160),
    **{name: timm_model(name) for name in (
        "resnet18", "vit_tiny_patch16_224", "convnext_atto", "efficientnet_b0", "levit_128s",
    )},
    "shufflenet of torchvision": torchvision_model("shufflenet_v2_x0_5"),
    "ViT of Transformers": transformers_model("ViTConfig", num_hidden_layers=2),
}  # fmt: skip


def predictions(way, folder=None):
    """Return the answers about a model on all cards, by the way in which it is given."""
    images, classes = torch.rand(BATCH, *way.sizes), torch.zeros(BATCH, dtype=torch.long)
    asked = {"object": (way.make(), {"example_input": images})}
    asked["with targets"] = (way.make(), {"example_input": (images, classes)})
    if way.name is not None:
        asked["name"] = (way.name, {"batch_size": BATCH})
    if folder is not None:
        asked["file"] = (exported(way, folder / "model.onnx"), {"batch_size": BATCH})
    return {
        how: trappm.compare(model, CARDS, **given, **SETTINGS)
        for how, (model, given) in asked.items()
    }


def exported(way, path):
    model, images = way.make().eval(), torch.rand(2, *way.sizes)
    for parameter in model.parameters():
        nn.init.normal_(parameter)  # the exporter shares parameters of equal values
    batch = {0: torch.export.Dim("batch", min=1, max=65_536)}
    torch.onnx.export(model, (images,), path, dynamic_shapes=(batch,), verbose=False)
    return path


def assert_one_answer(answers):
    (_, of_first), *others = answers.items()
    for how, of_other in others:
        for first, other in zip(of_first, of_other, strict=True):
            for figure in FIGURES:
                values = getattr(first, figure), getattr(other, figure)
                is_close = values[1] == pytest.approx(values[0], rel=0.01)
                assert is_close, (first.model, first.device, how, figure, *values)


@pytest.mark.parametrize("model", FAST)
def test_a_step_has_one_answer_however_its_model_is_given(model):
    assert_one_answer(predictions(FAST[model]))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", SLOW)
def test_models_of_all_sources_have_one_answer_however_they_are_given(model):
    assert_one_answer(predictions(SLOW[model]))


@pytest.mark.slow
@pytest.mark.extension("onnx")
@pytest.mark.parametrize("model", ["test_resnet", "resnet18"])
def test_an_exported_file_has_the_answer_of_its_module(model, tmp_path):
    pytest.importorskip("onnxscript")
    assert_one_answer(predictions((FAST | SLOW)[model], tmp_path))


@pytest.mark.parametrize("card", CARDS)
def test_a_step_unlike_all_labels_takes_its_tensors_and_a_plain_process(card):
    images, classes = torch.rand(BATCH, 3, 64, 64), torch.zeros(BATCH, dtype=torch.long)
    answer = trappm.predict(small(), example_input=images, targets=classes, device=card, **SETTINGS)
    beside_mib = answer.memory_mib - answer.simulated_memory.reserved_with_workspace_mib
    assert beside_mib == pytest.approx(process_memory_mib(card, Phase.TRAIN), rel=0.05)


def test_labels_of_others_are_predicted_without_the_excess_of_their_process():
    head = shipped_heads("a100-40gb")[Phase.TRAIN].heads.heads["memory_mib"]
    of_sheet = replace(head, excess=0.0)
    step = trace("test_resnet", 160)
    workload = Workload(graph=step.graph.at(BATCH), trace=step)
    plain, sheet = head.predict([workload]), of_sheet.predict([workload])
    assert head.excess == pytest.approx(972, abs=1)
    assert plain.median == pytest.approx(sheet.median - head.excess)
    width = sheet.high - sheet.low
    assert plain.high - plain.low == pytest.approx(width, rel=0.05)
    risks = head.exceeding([workload], 1000.0), of_sheet.exceeding([workload], 1000 + head.excess)
    assert risks[0] == risks[1]
    own = shipped_heads("h100")[Phase.TRAIN].heads.heads["memory_mib"]
    assert own.excess == 0


def test_labels_of_others_are_predicted_in_the_loop_of_the_question():
    # The labels of the A100 are of a loop with momentum, weight decay and cuDNN's benchmark.
    plain, momentum = (
        trappm.predict("resnet18", batch_size=BATCH, device="a100", optimizer=optimizer)
        for optimizer in ("sgd", "momentum")
    )
    process_mib = process_memory_mib("a100", Phase.TRAIN)
    simulated = [
        process_mib + answer.simulated_memory.reserved_with_workspace_mib
        for answer in (plain, momentum)
    ]
    ratio = momentum.memory_mib / plain.memory_mib
    assert ratio == pytest.approx(simulated[1] / simulated[0], rel=0.01)
    assert ratio > 1.02
