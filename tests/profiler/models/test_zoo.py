"""timm's architectures: their names, families and input sizes."""

import pytest
import torch

from trappm.profiler.errors import UnknownArchitectureError
from trappm.profiler.models import zoo
from trappm.profiler.models.families import family_of


def test_old_names_and_tags_build_the_same_model():
    with torch.device("meta"):
        old, new = (zoo.create_model(n, 64) for n in ("tv_resnet34", "resnet34.tv_in1k"))
    assert [p.shape for p in old.parameters()] == [p.shape for p in new.parameters()]
    assert zoo.architectures(["tv_resnet34", "resnet34.a1_in1k"]) == ["resnet34"]
    assert zoo.native_input_size("tv_resnet34") == 224


def test_patterns_that_match_nothing_are_refused():
    with pytest.raises(UnknownArchitectureError):
        zoo.architectures(["resnet18", "no_such_*"])


@pytest.mark.parametrize(
    ("architecture", "input_size"),
    [("test_vit", 32), ("swin_s3_tiny_224", 64)],
)
def test_models_accept_their_input_size(architecture, input_size):
    with torch.device("meta"):
        model = zoo.create_model(architecture, input_size).eval()
        output = model(torch.zeros(2, 3, input_size, input_size))
    assert output.shape == (2, 1000)


@pytest.mark.parametrize(
    ("architecture", "family"),
    [
        ("convnextv2_atto", "convnext"),
        ("swinv2_cr_tiny_224", "swin"),
        ("mobilevit_s", "mobilevit"),
        ("hf:gpt2-xl,lora=8", "gpt2"),
        ("hf:EleutherAI/pythia-160m", "pythia"),
        ("hf:./models/bert.json", "bert"),
        ("hf:org/7b", "7b"),
    ],
)
def test_architectures_belong_to_families(architecture, family):
    assert family_of(architecture) == family
