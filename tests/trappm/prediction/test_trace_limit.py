"""The limit of the time in which a module runs on the values of its example."""

import pytest
import torch
from torch import nn

import trappm
from trappm.profiler.errors import InputError, TraceTimeoutError

IMAGES, CLASSES = torch.rand(4, 3, 8, 8), torch.zeros(4, dtype=torch.long)


class Deciding(nn.Module):
    """A classifier of many layers whose operators depend on computed values."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(192, 10)

    def forward(self, images):
        scores = self.head(images.flatten(1))
        for _ in range(50):
            if scores.mean() < 1e9:
                scores = scores * 2
        return scores


def ask(module, **more):
    return trappm.predict(
        module, example_input=IMAGES, targets=CLASSES, device="a100", precision="fp32", **more
    )


def test_running_on_values_ends_after_the_limit_with_one_line(module_home):
    with pytest.raises(TraceTimeoutError) as refusal:
        ask(Deciding(), trace_seconds=0.001)
    message = str(refusal.value)
    assert "Deciding depends on the values" in message
    assert "more than 0.001 s" in message
    assert "more trace_seconds" in message
    assert "\n" not in message


def test_traces_without_values_and_names_have_no_limit(module_home):
    module = nn.Sequential(nn.Flatten(), nn.Linear(192, 10))
    assert ask(module, trace_seconds=0.001).memory_source == "traced"
    assert trappm.predict("test_resnet", device="a100", trace_seconds=0.001).memory_mib


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), "2"])
def test_a_limit_that_is_no_time_is_refused(seconds):
    with pytest.raises(InputError, match="trace_seconds is"):
        ask(Deciding(), trace_seconds=seconds)
