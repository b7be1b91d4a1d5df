"""The names of `trappm`: what `dir` and `help` show, and what wrong arguments raise."""

import pydoc

import pytest

import trappm

FUNCTIONS = ("compare", "devices", "predict")


def test_dir_lists_only_public_names():
    assert {name for name in dir(trappm) if not name.startswith("_")} == {
        name for name in trappm.__all__ if not name.startswith("_")
    }


def test_help_describes_every_function():
    text = pydoc.render_doc(trappm, renderer=pydoc.plaintext)
    for name in FUNCTIONS:
        assert f"    {name}(" in text
        assert getattr(trappm, name).__doc__.splitlines()[0] in text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.pt", "holds weights, not a step; export"),
        ("resnet50.pth", "holds weights, not a step; export"),
        ("folder/model.safetensors", "holds weights, not a step; export"),
        ("torchvision.models.resnet50", r"trappm.predict\(torchvision.models.resnet50\(\), "),
        ("torchvision.models.resnet50()", "or give a name: did you mean 'resnet50'"),
    ],
)
def test_invalid_model_names_are_explained(name, message, tmp_path, monkeypatch, refused):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))
    with refused(message):
        trappm.predict(name)
