"""Predictions of text generation: cache, weights, FLOP, invalid arguments."""

import pytest

pytest.importorskip("transformers")

import torch

from trappm.extensions.transformers.decoder import Decoder
from trappm.extensions.transformers.generation import generate
from trappm.extensions.transformers.model_heads import HOST_RANGE
from trappm.profiler.models.sources import source_of
from trappm.profiler.records import Precision


@pytest.mark.parametrize("name", ["llama-tiny", "gpt2-tiny", "mistral-tiny"])
def test_cache_size_equals_that_of_a_real_cache(name):
    decoder = Decoder(f"hf:{name}", 120, 3, Precision.FP32)
    model = source_of(f"hf:{name}").create_model(f"hf:{name}", 120).eval()
    with torch.inference_mode():
        cache = model(torch.zeros(3, 99, dtype=torch.long), use_cache=True).past_key_values
        cache = model(
            torch.zeros(3, 1, dtype=torch.long), past_key_values=cache, use_cache=True
        ).past_key_values
    real_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert decoder.cache_bytes(100) == real_bytes
    assert decoder.weight_bytes == sum(p.nbytes for p in model.parameters())


def test_flops_per_token_grow_linearly_with_context():
    decoder = Decoder("hf:llama-tiny,eager", 400, 2, Precision.BF16)
    first, second, third = (decoder.decode(context).flops for context in (100, 200, 300))
    assert first < second
    assert third - second == second - first


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hf:bert-tiny"], "not a decoder"),
        (["hf:llama-tiny", "--prompt", "500", "--tokens", "20"], "supports at most 512"),
    ],
)
def test_invalid_arguments_give_one_line(words, message, refusal):
    assert message in refusal("generate", *words)


@pytest.mark.parametrize(
    ("name", "batch_size", "first_token_ms", "token_ms"),
    [(",eager", 1, 33.6, 25.8), ("", 32, 786.0, 51.7)],
)
def test_generation_agrees_with_published_steps(name, batch_size, first_token_ms, token_ms):
    made = generate(
        f"hf:llama-2-7b{name}", prompt=256, tokens=512, batch_size=batch_size, device="a100-80gb"
    )
    assert made.first_token_ms == pytest.approx(first_token_ms, rel=0.05)
    assert made.token_ms == pytest.approx(token_ms, rel=0.1)
    low, high = made.token_interval_ms
    assert made.token_ms / HOST_RANGE <= low < token_ms < high <= 2.05 * made.token_ms


def test_no_step_reads_the_last_token(monkeypatch):
    contexts, decode = [], Decoder.decode

    def decode_after(self, context):
        contexts.append(context)
        return decode(self, context)

    monkeypatch.setattr(Decoder, "decode", decode_after)
    generate("hf:llama-tiny", prompt=16, tokens=4, device="a100")
    assert contexts == [16, 18]


def test_cards_without_decode_steps_are_named():
    settings = {"prompt": 16, "tokens": 2, "batch_size": 64}
    known = generate("hf:llama-tiny", device="a100", precision="bf16", **settings)
    made = generate("hf:llama-tiny", device="h100", precision="bf16", **settings)
    assert "No decode steps" in made.remarks[0]
    assert made.remarks != known.remarks
    spreads = [high / low for low, high in (known.token_interval_ms, made.token_interval_ms)]
    assert spreads[0] < spreads[1]
