"""Pools of transformers: their sizes, and how they are trained."""

import pytest

from trappm.profiler.models.pool import PoolGroup, PoolSpec, build_pool


def text_group(**changes):
    return PoolGroup(
        **{
            "architectures": ("hf:gpt2-micro", "hf:t5-micro"),
            "batch_sizes": (2,),
            "sequence_lengths": (32, 64),
            **changes,
        }
    )


def built(**changes):
    pytest.importorskip("transformers")
    return build_pool(PoolSpec(groups=(text_group(**changes),)))


def test_pool_has_every_combination_of_training_methods():
    pool = built(
        architectures=("hf:gpt2-micro",),
        sequence_lengths=(32,),
        methods=("full", "lora=4", "frozen=embeddings"),
        checkpointing=(False, True),
        attentions=("sdpa", "eager"),
        vocabularies=("native", 4096),
        optimizers=("adamw",),
    )
    assert len(pool) == len({c.architecture for c in pool}) == 3 * 2 * 2 * 2
    assert {"hf:gpt2-micro", "hf:gpt2-micro,lora=4,vocabulary=4096,checkpointing,eager"} < {
        c.architecture for c in pool
    }
    assert str(pool[0]) == "hf:gpt2-micro batch 2 at 32 tokens, adamw"


def test_group_may_mix_text_and_image_models():
    pool = built(architectures=("hf:*-micro", "resnet18"), input_sizes=(48, "native"))
    sizes = {(c.architecture, c.input_size) for c in pool}
    assert {size for name, size in sizes if name == "hf:vit-micro"} == {48, 64}
    assert {size for name, size in sizes if name == "resnet18"} == {48, 224}
    assert {size for name, size in sizes if name == "hf:t5-micro"} == {32, 64}
    assert "hf:vit-micro batch 2 at 48 px" in map(str, pool)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_lengths": (), "input_sizes": (32,)}, "takes text; .* needs sequence_lengths"),
        ({"architectures": ("resnet18",)}, "resnet18 takes images; .* needs input_sizes"),
        ({"sequence_lengths": (513,)}, "hf:gpt2-micro supports at most 512 tokens, not 513"),
        ({"methods": ("half",)}, "methods holds 'half'; there are: full, lora=RANK"),
        (
            {"architectures": ("hf:vit-micro",), "input_sizes": (32,), "sequence_lengths": (),
             "vocabularies": (512,)},
            "image model without a vocabulary",
        ),
    ],
)  # fmt: skip
def test_invalid_group_of_transformers_gives_one_line(changes, message, refused):
    with refused(message):
        built(**changes)
