import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trappm.profiler.models.families import FAMILIES, family_of


@pytest.mark.parametrize(
    ("architecture", "family"),
    [
        ("convnextv2_atto", "convnext"),
        ("densenetblur121d", "densenet"),
        ("tf_efficientnetv2_b0", "efficientnet"),
        ("semnasnet_075", "mnasnet"),
        ("tf_mobilenetv3_small_100", "mobilenet"),
        ("mobilenetv4_conv_small", "mobilenet"),
        ("poolformerv2_s12", "poolformer"),
        ("wide_resnet50_2", "resnet"),
        ("resnet18", "resnet"),
        ("swinv2_cr_tiny_224", "swin"),
        ("vgg11_bn", "vgg"),
        ("visformer_tiny", "visformer"),
        ("vit_tiny_patch16_224", "vit"),
        ("test_vit4", "vit"),
        ("repvgg_a0", "repvgg"),
        ("vitamin_small_224", "vitamin"),
        ("mobilevit_s", "mobilevit"),
        ("legacy_xception", "xception"),
        ("regnetx_002", "regnetx"),
        ("hf:gpt2-xl,lora=8", "gpt2"),
        ("hf:llama-3.2-1b,checkpointing", "llama"),
        ("hf:t5-base", "t5"),
        ("hf:vit-base", "vit"),
        ("hf:EleutherAI/pythia-160m", "pythia"),
        ("hf:./models/bert.json", "bert"),
    ],
)
def test_family_of(architecture, family):
    assert family_of(architecture) == family


def test_the_eleven_families_of_the_paper():
    assert list(FAMILIES) == [
        "convnext", "densenet", "efficientnet", "mnasnet", "mobilenet", "poolformer",
        "resnet", "swin", "vgg", "visformer", "vit",
    ]  # fmt: skip


@given(st.text(min_size=1))
def test_every_name_has_a_family(name):
    assert family_of(name)
    assert family_of(name) == family_of(name)


def test_asking_for_a_family_brings_in_neither_torch_nor_timm():
    code = (
        "import sys; import trappm.profiler.models.pool;"
        "from trappm.profiler.models.families import family_of;"
        "print(family_of('resnet18'), 'torch' in sys.modules, 'timm' in sys.modules)"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert output.stdout.split() == ["resnet", "False", "False"]
