"""The names of `trappm`: what `dir` and `help` show, and what wrong arguments raise."""

from __future__ import annotations

import pydoc
from pathlib import Path

import pytest
import torch
from torch import nn

import trappm
from trappm.extensions.transformers import model_names as names
from trappm.extensions.transformers.model_names import TransformerName, builtin_shapes
from trappm.profiler.errors import InputError
from trappm.profiler.files.yaml_text import load_yaml

HUB_IDS = Path(names.__file__).with_name("hub_ids.yaml")
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
    ("hub_id", "shape"),
    [
        ("hf:EleutherAI/pythia-14m", "hf:pythia-14m"),
        ("hf:eleutherai/Pythia-14M,checkpointing", "hf:pythia-14m,checkpointing"),
    ],
)
def test_an_id_of_the_hub_answers_where_its_shape_ships(hub_id, shape):
    pytest.importorskip("transformers")
    by_id, by_shape = (trappm.estimate(name, sequence_length=32) for name in (hub_id, shape))
    assert by_id.memory_mib("a100") == by_shape.memory_mib("a100")


def test_the_ids_of_the_hub_are_of_shapes_that_ship():
    assert (
        str(TransformerName.parse("hf:meta-llama/Llama-2-7b-hf,lora=8")) == "hf:llama-2-7b,lora=8"
    )
    ids = load_yaml(HUB_IDS.read_bytes(), str(HUB_IDS))
    assert ids.keys() <= builtin_shapes().keys()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama-2-7b", "did you mean 'hf:llama-2-7b'"),
        ("meta-llama/Llama-2-7b-hf", "did you mean 'hf:llama-2-7b'"),
        ("org/model", "cannot be read.*for a transformer of the Hub write hf:org/model"),
        ("hf:Llama-2-7b-hf", "did you mean 'llama-2-7b'"),
        ("hf:somebody/Llama-2-7b-hf", "or try hf:llama-2-7b"),
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
    if name.startswith("hf:somebody"):
        pytest.importorskip("transformers")
    with pytest.raises(InputError, match=message) as refusal:
        getattr(trappm, function)(name)
    assert "\n" not in str(refusal.value)
