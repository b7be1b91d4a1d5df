"""The names of `trappm`: what `dir` and `help` show, and what wrong arguments raise."""

from __future__ import annotations

import pydoc

import pytest
import torch
from torch import nn

import trappm
from trappm.profiler.errors import InputError

FUNCTIONS = ("estimate", "generate", "lookup", "predict", "predict_parallel")


def test_dir_has_the_public_names_alone():
    assert {name for name in dir(trappm) if not name.startswith("_")} == {
        name for name in trappm.__all__ if not name.startswith("_")
    }


def test_help_describes_every_function():
    text = pydoc.render_doc(trappm, renderer=pydoc.plaintext)
    for name in FUNCTIONS:
        assert f"    {name}(" in text
        assert getattr(trappm, name).__doc__.splitlines()[0] in text


IMAGES = torch.empty(2, 3, 8, 8)
NET = nn.Flatten()


@pytest.mark.parametrize(
    ("function", "arguments", "options", "message"),
    [
        ("predict", (), {}, "missing a required argument: 'model'"),
        ("predict", ("resnet18", "a100"), {}, "give options by name, such as device='a100'"),
        ("predict", ("resnet18", IMAGES), {}, "give options by name"),
        ("predict", (NET, IMAGES, IMAGES), {}, r"call trappm.estimate\(module, \*inputs, targets="),
        ("predict", (NET, [IMAGES]), {}, "takes a module and one tensor"),
        ("predict", (NET, IMAGES), {"loss": torch.sum}, r"but trappm.estimate\(\) has"),
        ("predict", (NET,), {}, "such as example_input=torch.empty"),
        ("predict", ("resnet18",), {"batchsize": 2}, "did you mean 'batch_size'"),
        ("predict", ("resnet18",), {"optimizer": torch.optim.RMSprop}, "optimizer is RMSprop"),
        ("lookup", ("resnet18",), {"device": "a100", "batchsize": 2}, "mean 'batch_size'"),
        ("lookup", (NET,), {"device": "a100"}, r"call trappm.predict\(module"),
        ("lookup", ("resnet18",), {"device": "a100", "batch_size": "8"}, "batch size is '8'"),
        ("generate", (), {}, "missing a required argument: 'model'"),
        ("generate", ("hf:gpt2",), {"promt": 3}, "did you mean 'prompt'"),
        ("predict_parallel", (), {}, "missing a required argument: 'model'"),
        ("predict_parallel", ("resnet18",), {"precison": "bf16"}, "did you mean 'precision'"),
    ],
)
def test_wrong_arguments_are_refused_in_a_line(function, arguments, options, message):
    with pytest.raises(InputError, match=message) as refusal:
        getattr(trappm, function)(*arguments, **options)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.pt", "holds weights, not a step; export"),
        ("resnet50.pth", "holds weights, not a step; export"),
        ("folder/model.safetensors", "holds weights, not a step; export"),
        ("torchvision.models.resnet50", r"call trappm.estimate\(torchvision.models.resnet50\(\), "),
        ("torchvision.models.resnet50()", "or give a name: did you mean 'resnet50'"),
    ],
)
@pytest.mark.parametrize("function", ["predict", "estimate"])
def test_names_that_are_none_get_a_line_that_helps(function, name, message, tmp_path, monkeypatch):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))
    with pytest.raises(InputError, match=message) as refusal:
        getattr(trappm, function)(name)
    assert "\n" not in str(refusal.value)
