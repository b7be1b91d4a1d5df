"""Causal language models with low-rank adapters: from weights at hand, or a tiny one without any.

Nothing is downloaded and no code that comes with a model is run: weights are a folder, or a name
that Hugging Face's cache on this machine has, as safetensors. The tiny one is made from a
configuration with random weights; it shows that a method runs, not what a trained model is worth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from trappm.profiler.errors import InputError, from_extra, one_line
from trappm.profiler.models.torchvision_shim import register_missing_operators

RANK = 8
"""Of the adapters. A usual one; our choice, as the thesis's is not in our notes."""
TINY: dict[str, int] = {
    "vocab_size": 256,  # bytes
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
"""Of a Llama; round numbers for a laptop core."""


@dataclass(frozen=True, eq=False)
class Decoder:
    """How one is made, and how it reads text."""

    make: Callable[[], nn.Module]
    """The body without language-model head: frozen, with fresh adapters that learn."""
    token_ids: Callable[[str], list[int]]


def tiny_decoder() -> Decoder:
    """A Llama of two layers with random weights, which reads bytes.

    Raises:
        InputError: transformers or peft is not installed.
    """
    transformers = _libraries()

    def body() -> Any:
        config = transformers.AutoConfig.for_model("llama", **TINY)
        return transformers.AutoModel.from_config(config)

    return Decoder(lambda: _adapted(body()), lambda text: list(text.encode()))


def stored_decoder(name: str) -> Decoder:
    """A model with its tokenizer; its weights are read anew whenever one is made.

    Args:
        name: a folder, or an id in Hugging Face's cache on this machine.

    Raises:
        InputError: transformers or peft is not installed, there is no such model here, or it is no
            causal language model.
    """
    transformers = _libraries()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    here = {"local_files_only": True, "trust_remote_code": False}
    try:
        kind = transformers.AutoConfig.from_pretrained(name, **here).model_type
        if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise InputError(f"{name!r} is of type {kind}, no causal language model")
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **here)
    except (OSError, ValueError) as error:
        raise InputError(
            f"there is no language model {name!r} on this machine, and nothing is downloaded; give "
            f"a folder with config.json, tokenizer and safetensors ({one_line(error)})"
        ) from error

    def body() -> Any:
        try:
            return transformers.AutoModel.from_pretrained(
                name, use_safetensors=True, dtype="auto", **here
            )
        except (OSError, ValueError) as error:
            raise InputError(
                f"the weights of {name!r} cannot be read: {one_line(error)}; give safetensors"
            ) from error

    return Decoder(
        lambda: _adapted(body()),
        lambda text: cast("list[int]", tokenizer(text, add_special_tokens=False)["input_ids"]),
    )


def _adapted(body: nn.Module) -> nn.Module:
    from trappm.profiler.transformers.library import with_adapters

    return with_adapters(body, RANK)


def _libraries() -> Any:
    register_missing_operators()
    with from_extra("transformers", "a language model"):
        import peft  # noqa: F401
        import transformers
    return transformers
