import pytest
import torch

from trappm.profiler.errors import InputError, UnknownArchitectureError
from trappm.profiler.models import zoo


def test_globs_and_names_give_each_architecture_once_and_sorted():
    names = zoo.architectures(["vgg11*", "vgg11", "resnet18"])
    assert names == ["resnet18", "vgg11", "vgg11_bn"]


@pytest.mark.parametrize(
    ("name", "now"),
    [
        ("resnet50", "resnet50"),
        ("resnet50.a1_in1k", "resnet50"),  # the tag says how weights were trained
        ("tf_efficientnet_b0_ns", "tf_efficientnet_b0"),  # so did old names
        ("gluon_resnet50_v1d", "resnet50d"),
        ("resnet*", "resnet*"),
        ("resnet1888.tag", "resnet1888"),
    ],
)
def test_tags_and_old_names_lead_to_the_architecture_of_today(name, now):
    assert zoo.current_name(name) == now


def test_widths_that_timm_renames_wrongly_are_kept_apart():
    assert zoo.current_name("ig_resnext101_32x16d") == "resnext101_32x16d"
    with pytest.raises(UnknownArchitectureError):
        zoo.check("ig_resnext101_32x48d")  # exists no longer


def test_old_names_and_tags_can_be_built_and_mean_the_same_model():
    with torch.device("meta"):
        old, new = (zoo.create_model(n, 64) for n in ("tv_resnet34", "resnet34.tv_in1k"))
    assert [p.shape for p in old.parameters()] == [p.shape for p in new.parameters()]
    assert zoo.architectures(["tv_resnet34", "resnet34.a1_in1k"]) == ["resnet34"]
    assert zoo.native_input_size("tv_resnet34") == 224


@pytest.mark.parametrize("pattern", ["resnet1888", "no_such_*", ""])
def test_what_matches_nothing_is_refused(pattern):
    with pytest.raises(UnknownArchitectureError):
        zoo.architectures(["resnet18", pattern])


def test_the_nearest_spelling_is_told():
    with pytest.raises(UnknownArchitectureError, match=r"resnet8.*resnet18"):
        zoo.check("resnet8")
    with pytest.raises(UnknownArchitectureError, match="vit_tiny_patch16_224"):
        zoo.create_model("vit_tiny_patch16_22", 64)


@pytest.mark.parametrize(
    ("architecture", "input_size"),
    [("test_vit", 32), ("test_vit", 160), ("test_resnet", 40), ("swin_s3_tiny_224", 64)],
)
def test_models_take_the_input_size_they_were_made_for(architecture, input_size):
    with torch.device("meta"):
        model = zoo.create_model(architecture, input_size).eval()
        output = model(torch.zeros(2, 3, input_size, input_size))
    assert output.shape == (2, 1000)


def test_an_input_size_that_cannot_be_built_is_told_with_one_that_can():
    with pytest.raises(InputError, match=r"nest_tiny.*100 px.*224 px"):
        zoo.create_model("nest_tiny", 100)


def test_input_size_zero_is_refused():
    with pytest.raises(InputError, match="input size is 0"):
        zoo.create_model("resnet18", 0)
