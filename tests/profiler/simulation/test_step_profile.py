"""A step profile survives its bytes, and nothing else passes for one."""

import pytest
import torch
from torch import nn

from trappm.profiler.errors import TrappmError, UnsupportedModelError
from trappm.profiler.records import Optimizer
from trappm.profiler.simulation.step_profile import StepProfile
from trappm.profiler.static_profile import step_profile


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 10)
        self.convolution.bias.requires_grad_(False)

    def forward(self, x):
        return self.head(self.norm(self.convolution(x)).relu().mean((2, 3)))


@pytest.fixture(scope="module")
def profile():
    return step_profile(Tiny(), 16)


def test_profiles_count_trained_and_frozen_parameters(profile):
    assert profile.trainable_parameters == 8 * 27 + 8 + 8 + 80 + 10
    assert profile.frozen_parameters == 8


def test_profiles_are_read_back_unchanged(profile):
    data = profile.to_bytes()
    again = StepProfile.from_bytes(data)
    assert again.to_bytes() == data
    assert again.saved_bytes == profile.saved_bytes
    assert again.trainable_parameters == profile.trainable_parameters
    assert again.frozen_parameters == profile.frozen_parameters
    for optimizer in Optimizer:
        assert again.memory(5, optimizer) == profile.memory(5, optimizer)


def test_equal_models_have_equal_bytes(profile):
    assert step_profile(Tiny(), 16).to_bytes() == profile.to_bytes()


@pytest.mark.parametrize("end", [0, 0.5, 0.99])
def test_damaged_bytes_are_refused(profile, end):
    data = profile.to_bytes()
    with pytest.raises(TrappmError, match="damaged"):
        StepProfile.from_bytes(data[: int(end * len(data))])


def test_untraceable_steps_are_refused_with_a_reason():
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return (x.mean((2, 3)) if x.sum() > 0 else -x.mean((2, 3))) * self.weight

    with pytest.raises(
        UnsupportedModelError, match=r"cannot be traced: .* needs the values of a tensor \(aten::"
    ):
        step_profile(Picky(), 16)
