"""What a fresh model multiplies by zero, and what of it a measured one does."""

import pytest
import torch
from torch import nn

from trappm.profiler.models.zoo import create_model
from trappm.profiler.records import Configuration
from trappm.profiler.steps import step as step_module
from trappm.profiler.steps.step import give_ordinary_gains, make_step


def zero_share(model):
    """Of all gradients of the parameters, how many are exactly 0."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    zeros = sum(int((gradient == 0).sum()) for gradient in gradients)
    return zeros / sum(gradient.numel() for gradient in gradients)


def gradients_of_a_step(architecture, monkeypatch, *, prepared):
    models = []

    def create(name, input_size):
        models.append(create_model(name, input_size))
        return models[-1]

    with monkeypatch.context() as patch:
        patch.setattr(step_module, "create_model", create)
        if not prepared:
            patch.setattr(step_module, "give_ordinary_gains", lambda _: None)
        configuration = Configuration(architecture=architecture, batch_size=8, input_size=64)
        make_step(configuration, torch.device("cpu"))()
    return zero_share(models[0])


@pytest.mark.parametrize(
    ("architecture", "fresh_share"),
    [("resnet18", 0.7), ("mixer_s32_224", 0.9)],
)
def test_few_gradients_of_a_measured_step_are_zero(architecture, fresh_share, monkeypatch):
    assert gradients_of_a_step(architecture, monkeypatch, prepared=False) > fresh_share
    assert gradients_of_a_step(architecture, monkeypatch, prepared=True) < 0.02


def test_biases_and_random_weights_are_not_changed():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm2d(4)  # weights of 1
            self.last = nn.BatchNorm2d(4)
            self.linear = nn.Linear(3, 5)
            self.head = nn.Linear(64, 64)
            self.gamma_1 = nn.Parameter(torch.full((4,), 1e-6))
            self.skip_gain = nn.Parameter(torch.tensor(0.0))
            self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
            self.pos_embed = nn.Parameter(torch.zeros(1, 9, 4))
            nn.init.zeros_(self.last.weight)
            nn.init.zeros_(self.head.weight)

    model = Model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    give_ordinary_gains(model)
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {"last.weight", "gamma_1", "skip_gain", "head.weight"}
    assert model.last.weight.tolist() == model.gamma_1.tolist() == [1.0] * 4
    assert model.skip_gain.item() == 1.0
    assert model.head.weight.std().item() == pytest.approx(1 / 8, rel=0.1)
    assert all(p.requires_grad for p in model.parameters())
