"""Transformers by name: texts, shapes, what is trained, what is refused."""

import functools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trappm
from trappm.extensions.transformers import model_names as names
from trappm.extensions.transformers.generation import generate
from trappm.extensions.transformers.model_names import (
    Attention,
    Frozen,
    TransformerName,
    builtin_shapes,
)
from trappm.profiler.errors import InputError
from trappm.profiler.files import load_yaml
from trappm.profiler.models.on_meta import on_meta
from trappm.profiler.models.sources import source_of

ROOT = Path(__file__).parents[3]

NAMES = (
    st.builds(
        TransformerName,
        name=st.sampled_from(["gpt2", "./config.json", "org/model"]),
        frozen=st.none() | st.sampled_from(Frozen),
        vocabulary=st.none() | st.integers(2, 1_000_000),
        checkpointing=st.booleans(),
        attention=st.sampled_from(Attention),
    )
    | st.builds(TransformerName, name=st.just("gpt2"), lora_rank=st.integers(1, 512))
    | st.builds(
        TransformerName,
        name=st.just("gpt2"),
        lora_rank=st.integers(1, 512),
        bits=st.sampled_from((8, 4)),
    )
)


@given(NAMES)
def test_names_round_trip_through_text(name):
    assert TransformerName.parse(str(name)) == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hf:", "names no model"),
        ("hf:gpt2,lora=0", "the LoRA rank is 0"),
        ("hf:gpt2,eager,sdpa", "contradicts or repeats"),
        ("hf:gpt2,lora=4,frozen=body", "cannot be combined"),
        ("hf:gpt2,int8,frozen=body", "int8 or int4 and frozen cannot be combined"),
        ("hf:gpt2,vocabulary=1", "from 2 to 1,000,000 tokens"),
    ],
)
def test_invalid_name_gives_one_line(text, message, refused):
    with refused(message):
        TransformerName.parse(text)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("gemma-2b", 2_506_172_416),
        ("t5-small", 60_506_624),
        ("vit-base", 86_567_656),
    ],
)
def test_shapes_have_the_published_number_of_parameters(name, parameters):
    pytest.importorskip("transformers")
    model = on_meta(f"hf:{name}", 224 if name == "vit-base" else 128)
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_only_adapters_are_trained():
    pytest.importorskip("peft")
    model = on_meta("hf:llama-tiny,lora=8", 64)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    # Query (128 to 128) and value (128 to 64) of two layers.
    assert trained == 2 * 8 * ((128 + 128) + (128 + 64))


@pytest.mark.parametrize("shape", ["gpt2-tiny", "t5-tiny", "vit-tiny"])
@pytest.mark.parametrize(("plain", "options", "bits"), [("lora=8", "qlora=8", 4), ("", "int8", 8)])
def test_quantization_packs_the_linear_layers_of_the_blocks_only(shape, plain, options, bits):
    if plain:
        pytest.importorskip("peft")
    full, packed = (
        on_meta(",".join(filter(None, (f"hf:{shape}", given))), 64) for given in (plain, options)
    )
    sizes = dict(full.named_parameters())
    kept = {"lm_head", "classifier", "decoder", "wo"}  # wo of T5 stays in 32 bits
    layers = {
        name for name, module in full.named_modules()
        if type(module).__module__.startswith(("torch.nn", "transformers.pytorch_utils"))
        and hasattr(module, "weight") and module.weight.dim() == 2
        and not isinstance(module, torch.nn.Embedding) and "lora_" not in name
        and not kept & {*name.removesuffix(".base_layer").rsplit(".", 1)}
    }  # fmt: skip
    packed_layers = {n for n, m in packed.named_modules() if type(m).__name__ == "PackedLinear"}
    assert packed_layers == layers
    for name, parameter in packed.named_parameters():
        if name.removesuffix(".weight") in layers:
            assert parameter.nbytes == sizes[name].numel() * bits / 8
        else:
            assert parameter.shape == sizes[name].shape


@pytest.mark.parametrize(("bits", "bias", "autocast"), [(4, False, True), (8, True, False)])
def test_packed_layers_compute_as_linear_ones(autocast, bias, bits):
    library = pytest.importorskip("trappm.extensions.transformers.library")
    linear = torch.nn.Linear(6, 5, bias=bias).requires_grad_(False)
    packed = library.PackedLinear(linear, bits)
    packed.weight.random_(0, 4)
    linear.weight.copy_(library._unpacked(packed.weight, linear.weight.shape, torch.float32))
    inputs = torch.randint(3, (2, 3, 6)).float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours, theirs = packed(inputs), linear(inputs)
    assert ours.dtype == inputs.dtype  # bitsandbytes returns the type of its input
    assert torch.allclose(ours, theirs.float())
    gradients = [torch.autograd.grad(made.float().sum(), inputs)[0] for made in (ours, theirs)]
    assert torch.equal(*gradients)


@pytest.mark.parametrize("option", ["qlora=8", "int8"])
def test_packed_weights_are_not_measured_and_do_not_generate(option):
    source, name = source_of("hf:"), f"hf:llama-tiny,{option}"
    for refused in (lambda: source.create_model(name, 64), lambda: source.architectures([name])):
        with pytest.raises(InputError, match="are predicted, not measured"):
            refused()
    with pytest.raises(InputError, match="generation with packed weights is not covered"):
        generate(name)


def test_another_vocabulary_changes_embeddings_head_and_tokens():
    pytest.importorskip("transformers")
    name = "hf:llama-tiny,vocabulary=5000"
    small, large = (
        sum(p.numel() for p in on_meta(text, 32).parameters()) for text in ("hf:llama-tiny", name)
    )
    assert large - small == 2 * (5000 - 1024) * 128
    assert source_of(name).inputs(name, 32).train["input_ids"].upper == 5000


def test_all_image_classifiers_of_transformers_take_pixels():
    pytest.importorskip("transformers")
    from trappm.extensions.transformers import library

    assert set(library.auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES) <= names._OF_IMAGES


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("{broken", "is not JSON"),
        ('{"model_type": "nonesuch"}', "'nonesuch', which transformers .* does not support"),
        (
            '{"model_type": "gpt2", "n_embd": "many"}',
            "StrictDataclassFieldValidationError: .*n_embd",
        ),
        ('{"model_type": "gpt2", "n_positions": 16}', "at most 16 tokens, not 32"),
    ],
)
def test_invalid_configuration_gives_one_line_input_error(tmp_path, config, reason, refused):
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(config)
    with refused(reason) as caught:
        on_meta(f"hf:{path}", 32)
    assert caught.value.exit_status == 2


@pytest.mark.parametrize(
    ("hub_id", "shape"),
    [
        ("hf:EleutherAI/pythia-14m", "hf:pythia-14m"),
        ("hf:meta-llama/Llama-2-7b-hf,lora=8", "hf:llama-2-7b,lora=8"),
    ],
)
def test_hub_id_resolves_to_the_built_in_shape(hub_id, shape):
    assert str(TransformerName.parse(hub_id)) == shape
    ids = Path(names.__file__).with_name("hub_ids.yaml")
    assert load_yaml(ids.read_bytes(), str(ids)).keys() <= builtin_shapes().keys()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama-2-7b", "did you mean 'hf:llama-2-7b'"),
        ("org/model", "cannot be read.*for a transformer of the Hub write hf:org/model"),
        ("hf:somebody/Llama-2-7b-hf", "or try hf:llama-2-7b"),
    ],
)
def test_unknown_name_gives_a_suggestion(name, message, tmp_path, monkeypatch, refused):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))
    if name.startswith("hf:somebody"):
        pytest.importorskip("transformers")
    with refused(message):
        trappm.predict(name)


def test_quantized_configurations_are_refused_with_a_remedy(tmp_path):
    pytest.importorskip("transformers")
    shape = dict(builtin_shapes()["llama-tiny"])
    file = tmp_path / "config.json"
    file.write_text(json.dumps(shape | {"quantization_config": {"quant_method": "gptq"}}))
    for ask in (functools.partial(trappm.predict, device="a100", precision="bf16"), generate):
        with pytest.raises(InputError, match=r"quantized weights.* add int8 or int4 to the name"):
            ask(f"hf:{file}")
