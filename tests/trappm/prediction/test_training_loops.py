"""Optimizers by their groups, and steps of several passes."""

import pytest
import torch
from torch import nn

import trappm
from trappm.profiler.memory.breakdown import Part

WIDTH = 2048
IMAGES, CLASSES = torch.empty(16, WIDTH, device="meta"), torch.zeros(16, dtype=torch.long)
LAYER_MIB = WIDTH**2 * 4 / 2**20


def deep():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)))


def ask(module, optimizer, **options):
    settings = {"device": "a100", "precision": "fp32"} | options
    return trappm.predict(
        module, example_input=IMAGES, targets=CLASSES, optimizer=optimizer, **settings
    )


def state_mib(answer):
    return answer.memory_breakdown.parts_mib.get(Part.OPTIMIZER, 0.0)


def test_adam_has_state_for_the_parameters_of_its_groups_only():
    model = deep()
    head, everything = (
        ask(model, torch.optim.Adam(layers.parameters())) for layers in (model[-1], model)
    )
    assert state_mib(head) == pytest.approx(2 * LAYER_MIB, rel=0.01)
    assert state_mib(everything) == pytest.approx(12 * LAYER_MIB, rel=0.01)
    assert head.memory_breakdown.parts_mib[Part.GRADIENTS] >= 5 * LAYER_MIB
    assert head.memory_mib < everything.memory_mib - 9 * LAYER_MIB
    assert head.step_time_ms < everything.step_time_ms
    assert "leaves out 20,971,520 of 25,165,824 trainable parameters" in " ".join(head.remarks)
    assert "leaves out" not in " ".join(everything.remarks)


def test_gradients_of_parameters_that_are_left_out_outlive_zero_grad():
    """The optimizer frees its own only, so a second one of each passes in the backward pass."""
    model = deep()
    left_out = ask(model, torch.optim.SGD(model[:1].parameters(), lr=0.1)).simulated_memory
    frozen = deep()
    frozen[1:].requires_grad_(False)
    none = ask(frozen, torch.optim.SGD(frozen[:1].parameters(), lr=0.1)).simulated_memory
    assert left_out.live_mib >= none.live_mib + 5 * LAYER_MIB


class SGD(torch.optim.Optimizer):
    """A class of the user's own, of which only the name is PyTorch's."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})


@pytest.mark.parametrize("kind", [SGD, torch.optim.Adagrad])
def test_other_classes_are_refused_in_one_line_by_their_whole_name(kind, refused):
    model = deep()
    with refused(rf"optimizer is .*{kind.__qualname__}; known are sgd.*name the one that keeps"):
        ask(model, kind(model.parameters()))


@pytest.mark.parametrize(("device", "optimizer"), [("a100", "adamw"), ("cpu-2t", None)])
def test_a_step_of_n_passes_has_one_optimizer_step(device, optimizer):
    settings = {"batch_size": 16, "device": device, "optimizer": optimizer}
    one, two, eight = (
        trappm.predict("resnet18", accumulation=n, **settings, epochs=1, samples=12_800)
        for n in (1, 2, 8)
    )
    per_pass = two.step_time_ms - one.step_time_ms
    assert 0.5 * one.step_time_ms < per_pass < one.step_time_ms  # without the optimizer
    assert eight.step_time_ms == pytest.approx(one.step_time_ms + 7 * per_pass)
    assert eight.samples_per_s == pytest.approx(8 * 16 * 1000 / eight.step_time_ms)
    assert eight.run.steps * 8 == one.run.steps
    assert eight.run.hours == pytest.approx(100 * eight.step_time_ms / 3.6e6)
    low, high = eight.intervals["step_time_ms"]
    assert low < eight.step_time_ms < high
    if one.energy_j is not None:
        assert eight.energy_j / one.energy_j == pytest.approx(eight.step_time_ms / one.step_time_ms)
    if one.memory_mib is not None:
        assert eight.memory_mib >= one.memory_mib


def test_the_best_power_limit_is_of_all_passes():
    settings = {"batch_size": 64, "device": "a100", "optimizer": "sgd"}
    one, four = (trappm.predict("resnet50", accumulation=n, **settings) for n in (1, 4))
    ratio = four.step_time_ms / one.step_time_ms
    for name in ("step_time_ms", "energy_j"):
        each, all_passes = (getattr(a.best_power_limit, name) for a in (one, four))
        assert all_passes == pytest.approx(ratio * each)


def test_parameters_of_the_optimizer_that_are_not_the_modules_have_a_remark():
    answer = ask(deep(), torch.optim.Adam(deep().parameters()))
    assert state_mib(answer) == pytest.approx(12 * LAYER_MIB, rel=0.01)
    assert "holds no parameter of this Sequential" in " ".join(answer.remarks)


def test_all_ways_to_accumulate_give_the_same_step(as_json):
    by_argument = trappm.predict("resnet18", batch_size=16, optimizer="adam", accumulation=4)
    loop = trappm.TrainingLoop(optimizer="adam", accumulation_steps=4)
    by_loop = trappm.predict("resnet18", batch_size=16, optimizer=loop)
    by_command = as_json("predict resnet18 --batch-size 16 --optimizer adam --accumulation 4")
    assert by_argument.step_time_ms == by_loop.step_time_ms == by_command["step_time_ms"]
    assert by_argument.memory_mib == pytest.approx(by_loop.memory_mib, rel=0.001)
