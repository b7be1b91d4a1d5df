"""The memory of a step by rules, against the bytes that autograd keeps."""

import pytest
import torch
from torch import nn

from trappm.profiler.models.model_input import Sample
from trappm.profiler.records import Optimizer
from trappm.profiler.simulation.memory_rules import memory_by_rules, saved_bytes_by_rules
from trappm.profiler.simulation.memory_simulation import Loop
from trappm.profiler.static_profile import StepSource, static_profile


@pytest.mark.parametrize(
    ("architecture", "input_size", "gap"),
    [
        ("test_resnet", 64, 0.001),
        ("test_vit", 64, 0.001),
        ("test_convnext", 64, 0.001),
        ("test_efficientnet", 64, 0.001),
        ("vgg11_bn", 32, 0.01),
    ],
)
def test_the_rules_give_the_bytes_that_autograd_keeps(architecture, input_size, gap):
    profile = static_profile(architecture, input_size)
    for batch_size in (2, 32):
        graph = profile.graph.at(batch_size)
        exact = profile.step.saved_bytes.at(batch_size)
        assert saved_bytes_by_rules(graph) == pytest.approx(exact, rel=gap)
        for loop in Loop:
            simulated = profile.memory(batch_size, loop=loop)
            assert simulated == profile.step.memory(batch_size, loop=loop)
            ruled = memory_by_rules(graph, loop=loop)
            assert ruled.live_mib == pytest.approx(simulated.live_mib, rel=0.3)


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 1, bias=False)
        self.head = nn.Linear(8, 5, bias=False)

    def forward(self, x):
        return self.head(torch.relu(self.convolution(x)).mean((2, 3)))


def test_what_is_kept_is_counted_by_hand():
    graph = static_profile(Counted(), Sample((3, 4, 4), torch.float32)).graph.at(2)
    images, features, pooled = 2 * 3 * 16, 2 * 8 * 16, 2 * 8
    assert saved_bytes_by_rules(graph) == 4 * (images + features + pooled)


def test_optimizers_add_their_states_and_adam_its_temporaries_where_they_are_the_peak():
    template = static_profile("test_resnet", 64).graph
    weights = template.parameters.sum() * 4 / 2**20
    large, small = (
        [memory_by_rules(template.at(batch), o).live_mib for o in Optimizer] for batch in (256, 1)
    )
    assert large[1] - large[0] == small[1] - small[0] == pytest.approx(weights)
    assert large[2] - large[0] == pytest.approx(2 * weights)
    assert 2.2 * weights < small[2] - small[0] <= 3 * weights


def test_a_tuned_loop_adds_momenta_and_the_temporaries_of_weight_decay():
    """The temporaries count where the optimizer's step is the peak."""
    template = static_profile("test_resnet", 64).graph
    weights = template.parameters.sum() * 4 / 2**20
    added = []
    for batch_size in (1, 256):
        graph = template.at(batch_size)
        plain, tuned = (memory_by_rules(graph, loop=loop).live_mib for loop in Loop)
        added.append(tuned - plain)
    assert added[1] == pytest.approx(weights)
    assert 1.2 * weights < added[0] <= 2 * weights


class Untraceable(nn.Module):
    """Its graph is known; in training it asks for values."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.head(self.convolution(x).mean((2, 3)))
        if self.training and x.sum() > 0:
            x = -x
        return x


def test_rules_answer_where_no_step_can_be_traced_and_say_why():
    profile = static_profile(Untraceable(), Sample((3, 8, 8), torch.float32))
    assert profile.step is None
    assert profile.step_source is StepSource.RULES
    assert "cannot be traced" in profile.step_refusal
    assert profile.memory(4) == memory_by_rules(profile.graph.at(4))
    assert profile.memory(8).live_mib > profile.memory(4).live_mib
    tuned = profile.memory(64, loop=Loop.TUNED)
    assert tuned.live_mib > profile.memory(64).live_mib
