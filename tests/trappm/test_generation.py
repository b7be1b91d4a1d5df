"""What it costs a decoder to generate: cache, weights, work, refusals."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import torch

from trappm import cli
from trappm.profiler.decoder_steps import Decoder
from trappm.profiler.models.sources import source_of
from trappm.profiler.records import Precision


@pytest.mark.parametrize("name", ["llama-tiny", "gpt2-tiny", "mistral-tiny"])
def test_the_cache_is_as_large_as_a_real_one(name):
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


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_work_of_a_token_grows_evenly_with_its_context(attention):
    decoder = Decoder(f"hf:llama-tiny,{attention}", 400, 2, Precision.BF16)
    first, second, third = (decoder.decode(context).flops for context in (100, 200, 300))
    assert first < second
    assert third - second == second - first


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hf:bert-tiny"], "no decoder"),
        (["hf:llama-tiny", "--prompt", "500", "--tokens", "20"], "takes at most 512"),
        (["hf:llama-tiny", "--batch-size", "0"], "batch size is 0"),
        (["hf:llama-tiny", "--device", "nothing"], "no card is known"),
    ],
)
def test_what_cannot_be_is_one_line(words, message, capsys):
    assert cli.run(["generate", *words]) == 2
    _, err = capsys.readouterr()
    assert message in err
    assert err.count("\n") == 1
