"""A step profile survives its bytes, and nothing else passes for one."""

import pytest
from small_modules import Function
from torch import nn

from trappm.profiler.errors import TrappmError
from trappm.profiler.records import Optimizer
from trappm.profiler.records.trace import StepProfile
from trappm.profiler.static_profile import step_profile


def tiny():
    model = Function(
        lambda self, x: self.head(self.norm(self.convolution(x)).relu().mean((2, 3))),
        convolution=nn.Conv2d(3, 8, 3, padding=1), norm=nn.BatchNorm2d(8), head=nn.Linear(8, 10),
    )  # fmt: skip
    model.convolution.bias.requires_grad_(False)
    return model


@pytest.fixture(scope="module")
def profile():
    return step_profile(tiny(), 16)


def test_profiles_count_parameters_and_are_read_back_unchanged(profile):
    assert profile.trainable_parameters == 8 * 27 + 8 + 8 + 80 + 10
    assert profile.frozen_parameters == 8
    data = profile.to_bytes()
    assert step_profile(tiny(), 16).to_bytes() == data
    again = StepProfile.from_bytes(data)
    assert again.to_bytes() == data
    assert again.saved_bytes == profile.saved_bytes
    assert again.trainable_parameters == profile.trainable_parameters
    assert again.frozen_parameters == profile.frozen_parameters
    for optimizer in Optimizer:
        assert again.memory(5, optimizer) == profile.memory(5, optimizer)


@pytest.mark.parametrize("end", [0, 0.5, 0.99])
def test_damaged_bytes_are_refused(profile, end):
    data = profile.to_bytes()
    with pytest.raises(TrappmError, match="damaged"):
        StepProfile.from_bytes(data[: int(end * len(data))])
