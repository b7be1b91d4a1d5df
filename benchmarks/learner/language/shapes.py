"""The decoders that sheets name, by the numbers in their published configurations."""

from __future__ import annotations

import re
from dataclasses import replace

from benchmarks.learner.language.decoder import Shape


def _llama(
    hidden: int, layers: int, heads: int, feed_forward: int, vocabulary: int = 32000,
    groups: int | None = None, *, head_width: int | None = None,
) -> Shape:  # fmt: skip
    return Shape(
        hidden=hidden, layers=layers, heads=heads, feed_forward=feed_forward, groups=groups,
        vocabulary=vocabulary, gated=True, root_mean_square=True, head_width=head_width,
    )  # fmt: skip


def _neox(
    hidden: int, layers: int, heads: int, vocabulary: int, *, rotary: float, shared: bool = False,
    head_bias: bool = False, biases: bool = True, groups: int | None = None,
) -> Shape:  # fmt: skip
    return Shape(
        hidden=hidden, layers=layers, heads=heads, feed_forward=4 * hidden, vocabulary=vocabulary,
        groups=groups, rotary_share=rotary, parallel=True, shared_norm=shared, biases=biases,
        head_bias=head_bias,
    )  # fmt: skip


def gpt(hidden: int, layers: int, heads: int, vocabulary: int, positions: int) -> Shape:
    """GPT-2 of this size: llm-foundry's MPT with flash attention, Megatron's GPT, GPT-3."""
    return Shape(
        hidden=hidden, layers=layers, heads=heads, feed_forward=4 * hidden, vocabulary=vocabulary,
        positions=positions, biases=True, tied=True,
    )  # fmt: skip


_LLAMA_3 = _llama(4096, 32, 32, 14336, 128256, 8)
_STABLE = _neox(4096, 16, 32, 50688, rotary=0.25)
SHAPES = {
    "codellama34b": _llama(8192, 48, 64, 22016, 32000, 8),
    "falcon40b": _neox(8192, 60, 128, 65024, rotary=1.0, biases=False, groups=8),
    "falcon7b": _neox(4544, 32, 71, 65024, rotary=1.0, biases=False, groups=1, shared=True),
    "gemma2b": _llama(2048, 18, 8, 16384, 256000, 1, head_width=256),
    "gemma7b": _llama(3072, 28, 16, 24576, 256000, head_width=256),
    "gemma22b": replace(_llama(2304, 26, 8, 9216, 256000, 4, head_width=256), post_norms=True),
    "gemma29b": replace(_llama(3584, 42, 16, 14336, 256000, 8, head_width=256), post_norms=True),
    "llama27b": _llama(4096, 32, 32, 11008),
    "llama213b": _llama(5120, 40, 40, 13824),
    "llama270b": _llama(8192, 80, 64, 28672, groups=8),
    "llama38b": _LLAMA_3,
    "llama318b": _LLAMA_3,
    "llama321b": _llama(2048, 16, 32, 8192, 128256, 8),
    "llama323b": _llama(3072, 28, 24, 8192, 128256, 8),
    "mistral7b": _llama(4096, 32, 32, 14336, 32000, 8),
    "mistral7bv02": _llama(4096, 32, 32, 14336, 32000, 8),
    "openllama3b": _llama(3200, 26, 32, 8640),
    "phi1513b": _neox(2048, 24, 32, 51200, rotary=0.5, shared=True, head_bias=True),
    "phi2": _neox(2560, 32, 32, 51200, rotary=0.4, shared=True, head_bias=True),
    "phi3": _llama(3072, 32, 32, 8192, 32064),
    "phi3mini4kinstruct": _llama(3072, 32, 32, 8192, 32064),
    "pythia1b": _neox(2048, 16, 8, 50304, rotary=0.25),
    "pythia69b": _neox(4096, 32, 32, 50432, rotary=0.25),
    "pythia12b": _neox(5120, 36, 40, 50688, rotary=0.25),
    "stablelmalpha3b": _STABLE,
    "stablelmbasealpha3b": _STABLE,
    "tinyllama": _llama(2048, 22, 32, 5632, groups=4),
}
"""By their names, letters and digits only. Vocabularies are padded as litgpt does, which ties no
embeddings to the head."""


def shape_named(name: str) -> Shape | None:
    return SHAPES.get(re.sub(r"[^a-z0-9]", "", name.lower()))
