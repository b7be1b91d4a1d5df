"""The names of `trappm`: what `dir` and `help` show, and what wrong arguments raise."""

from __future__ import annotations

import pydoc
from pathlib import Path

import pytest

import trappm
from trappm.profiler.errors import InputError
from trappm.profiler.files.yaml_text import load_yaml
from trappm.profiler.transformers import names
from trappm.profiler.transformers.names import TransformerName, builtin_shapes

HUB_IDS = Path(names.__file__).with_name("hub_ids.yaml")
FUNCTIONS = ("compare", "devices", "predict")


def test_dir_has_the_public_names_alone():
    assert {name for name in dir(trappm) if not name.startswith("_")} == {
        name for name in trappm.__all__ if not name.startswith("_")
    }


def test_help_describes_every_function():
    text = pydoc.render_doc(trappm, renderer=pydoc.plaintext)
    for name in FUNCTIONS:
        assert f"    {name}(" in text
        assert getattr(trappm, name).__doc__.splitlines()[0] in text


@pytest.mark.parametrize("name", ["estimate", "generate", "labels", "lookup", "predict_parallel"])
def test_an_earlier_name_says_what_replaces_it(name):
    with pytest.raises(AttributeError, match=f"trappm.{name} has moved; use trappm"):
        getattr(trappm, name)


@pytest.mark.parametrize(
    ("hub_id", "shape"),
    [
        ("hf:EleutherAI/pythia-14m", "hf:pythia-14m"),
        ("hf:eleutherai/Pythia-14M,checkpointing", "hf:pythia-14m,checkpointing"),
    ],
)
def test_an_id_of_the_hub_answers_where_its_shape_ships(hub_id, shape):
    pytest.importorskip("transformers")
    by_id, by_shape = (trappm.predict(name, sequence_length=32) for name in (hub_id, shape))
    assert by_id.memory_mib == by_shape.memory_mib


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
        ("torchvision.models.resnet50", r"trappm.predict\(torchvision.models.resnet50\(\), "),
        ("torchvision.models.resnet50()", "or give a name: did you mean 'resnet50'"),
    ],
)
def test_names_that_are_none_get_a_line_that_helps(name, message, tmp_path, monkeypatch):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))
    if name.startswith("hf:somebody"):
        pytest.importorskip("transformers")
    with pytest.raises(InputError, match=message) as refusal:
        trappm.predict(name)
    assert "\n" not in str(refusal.value)
