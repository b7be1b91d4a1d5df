import pytest

from trappm.profiler.models.families import FAMILIES, family_of


@pytest.mark.parametrize(
    ("architecture", "family"),
    [
        ("convnextv2_atto", "convnext"),
        ("tf_efficientnetv2_b0", "efficientnet"),
        ("semnasnet_075", "mnasnet"),
        ("tf_mobilenetv3_small_100", "mobilenet"),
        ("wide_resnet50_2", "resnet"),
        ("swinv2_cr_tiny_224", "swin"),
        ("test_vit4", "vit"),
        ("repvgg_a0", "repvgg"),
        ("vitamin_small_224", "vitamin"),
        ("mobilevit_s", "mobilevit"),
        ("legacy_xception", "xception"),
        ("hf:gpt2-xl,lora=8", "gpt2"),
        ("hf:llama-3.2-1b,checkpointing", "llama"),
        ("hf:vit-base", "vit"),
        ("hf:EleutherAI/pythia-160m", "pythia"),
        ("hf:./models/bert.json", "bert"),
    ],
)
def test_architectures_belong_to_families(architecture, family):
    assert family_of(architecture) == family


def test_the_paper_has_eleven_families():
    assert list(FAMILIES) == [
        "convnext", "densenet", "efficientnet", "mnasnet", "mobilenet", "poolformer",
        "resnet", "swin", "vgg", "visformer", "vit",
    ]  # fmt: skip
