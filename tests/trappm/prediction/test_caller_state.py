"""What a caller has set in its process neither changes answers nor is changed by them."""

import contextlib
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import trappm

IMAGES, CLASSES = torch.empty(16, 3, 32, 32), torch.zeros(16, dtype=torch.long)


def answer(model=None, **options):
    module = model or nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(7200, 10))
    return trappm.predict(
        module,
        example_input=IMAGES,
        targets=CLASSES,
        device="a100",
        precision="amp-fp16",
        **options,
    )


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "around",
    [
        lambda: torch.device("meta"),
        lambda: default_dtype(torch.float64),
        lambda: torch.autograd.set_detect_anomaly(True),
        torch.inference_mode,
        lambda: torch.autocast("cpu"),
        FakeTensorMode,
        lambda: torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"),
    ],
)
def test_modes_of_the_caller_change_nothing(around):
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(7200, 10))
    plain = answer(module)
    with around():
        inside = answer(module)
    assert inside.to_dict() == plain.to_dict()
    assert inside.step_time_ms is not None


def test_the_breakdown_of_a_prediction_does_not_depend_on_modes_either():
    prediction = answer()
    with torch.inference_mode():
        assert prediction.memory_breakdown.total_mib > 0


def test_a_named_model_can_be_asked_for_within_modes(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))  # so that it is traced within
    with torch.device("meta"):
        inside = trappm.predict("resnet10t", batch_size=4, input_size=64, device="a100")
    outside = trappm.predict("resnet10t", batch_size=4, input_size=64, device="a100")
    assert inside.to_dict() == outside.to_dict()


def test_random_numbers_threads_and_modes_of_the_caller_stay():
    class Drawing(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3072, 10)

        def forward(self, x):
            keep = random.random() + np.random.random()
            return self.head(x.flatten(1) * keep) + torch.rand(10, device="cpu").to(x.device)

    module = Drawing()

    def state():
        return (
            torch.get_num_threads(), random.getstate(), np.random.get_state()[1].tolist(),
            torch.is_grad_enabled(), torch.is_autocast_enabled("cuda"), torch.get_default_dtype(),
            torch.random.get_rng_state().tolist(),
        )  # fmt: skip

    before = state()
    answer(module)
    assert state() == before
