"""Names of transformers with options, such as `hf:gpt2,lora=8,checkpointing,eager`.

The part after `hf:` is a built-in shape (`shapes.yaml`), a Hub id with such a shape
(`hub_ids.yaml`), the path of a config.json, or a model id with a configuration in the local cache
of transformers. Parsing names does not import torch or transformers.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self, cast

from trappm.profiler.errors import InputError, UnknownArchitectureError, nearest
from trappm.profiler.files import load_yaml, read_plain
from trappm.profiler.models.pool import Attention
from trappm.profiler.records import unit_by_name

PREFIX = "hf:"
SOURCE = "trappm.extensions.transformers.library"
MAX_CONFIG_BYTES = 1 << 20
MAX_RANK = 65_536
MAX_VOCABULARY = 1_000_000
_OPTIONS = (
    "lora=RANK, qlora=RANK, int8, int4, frozen=embeddings, frozen=body, vocabulary=N, "
    "checkpointing, eager, sdpa, megatron"
)


def is_transformer(architecture: str) -> bool:
    """Return whether this is the name of a transformer."""
    return architecture.startswith(PREFIX)


class Frozen(enum.StrEnum):
    """Frozen parameters: the token embeddings, or everything except the head."""

    EMBEDDINGS = "embeddings"
    BODY = "body"


@dataclass(frozen=True, kw_only=True)
class TransformerName:
    """Name and training options of a transformer; `str` is the canonical text.

    Raises:
        InputError: The name is missing, or an option is invalid.
    """

    name: str
    lora_rank: int | None = None
    """Rank of LoRA adapters, which freeze all other parameters; None without adapters."""
    bits: int | None = None
    """Bits of the frozen weights of linear layers, 8 or 4; None for those of the precision. With
    LoRA and 4 bits, the method is QLoRA."""
    frozen: Frozen | None = None
    vocabulary: int | None = None
    """Vocabulary size that replaces the one of the configuration."""
    checkpointing: bool = False
    """True for activation checkpointing of each block."""
    attention: Attention = Attention.SDPA

    def __post_init__(self) -> None:
        if not self.name or "," in self.name or self.name != self.name.strip():
            raise InputError(f"{PREFIX}{self.name} names no model; name one, such as hf:gpt2")
        freezing = {"lora": self.lora_rank, "int8 or int4": self.bits}
        given = [method for method, value in freezing.items() if value is not None]
        if self.frozen is not None and given:
            raise InputError(
                f"{given[0]} and frozen cannot be combined, because {given[0]} freezes parameters "
                "itself; keep one of them"
            )
        if self.lora_rank is not None and not 1 <= self.lora_rank <= MAX_RANK:
            raise InputError(f"the LoRA rank is {self.lora_rank}; it must be 1 to {MAX_RANK:,}")
        if self.vocabulary is not None and not 2 <= self.vocabulary <= MAX_VOCABULARY:
            raise InputError(
                f"vocabulary={self.vocabulary}; it must be from 2 to {MAX_VOCABULARY:,} tokens"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a text such as `hf:llama-2-7b,lora=16`; Hub ids become names of shapes.

        Raises:
            InputError: The text is invalid.
        """
        name, *options = text.removeprefix(PREFIX).split(",")
        fields: dict[str, Any] = {}
        for option in options:
            added = _option(option, text)
            if fields.keys() & added.keys():
                raise InputError(f"{option!r} in {text} contradicts or repeats an option before it")
            fields |= added
        return cls(name=_hub_ids().get(name.lower(), name), **fields)

    def __str__(self) -> str:
        is_qlora = self.lora_rank is not None and self.bits == QLORA_BITS
        options = [
            *([f"{'q' * is_qlora}lora={self.lora_rank}"] if self.lora_rank else []),
            *([f"int{self.bits}"] if self.bits and not is_qlora else []),
            *([f"frozen={self.frozen}"] if self.frozen else []),
            *([f"vocabulary={self.vocabulary}"] if self.vocabulary else []),
            *(["checkpointing"] if self.checkpointing else []),
            *([] if self.attention is Attention.SDPA else [str(self.attention)]),
        ]
        return ",".join([PREFIX + self.name, *options])

    @property
    def is_builtin(self) -> bool:
        return self.name in builtin_shapes()

    @property
    def is_file(self) -> bool:
        return not self.is_builtin and self.name.endswith(".json")

    def shape(self) -> Mapping[str, Any] | None:
        """Return the configuration's fields, or None if only transformers can load them.

        Raises:
            InputError: The file is not a configuration.
            UnknownArchitectureError: The name is not a shape, a file or a model id.
        """
        if self.is_builtin:
            return builtin_shapes()[self.name]
        if self.is_file:
            return _config_of(Path(self.name))
        if "/" not in self.name:
            hint = nearest(shape_like(self.name) or self.name, builtin_shapes())
            raise UnknownArchitectureError(
                f"no transformer is named {self.name!r}; {hint} (or the path of a config.json, or "
                "a model id such as org/model)"
            )
        return None


_NUMBERS = {"lora": "lora_rank", "qlora": "lora_rank", "vocabulary": "vocabulary"}
QLORA_BITS = 4
_BITS = {"int8": 8, "int4": 4}


def _option(option: str, text: str) -> Mapping[str, Any]:
    """Return the fields set by an option."""
    key, _, value = option.partition("=")
    if key in _NUMBERS and value.isascii() and value.isdigit() and len(value) < 9:
        return {_NUMBERS[key]: int(value)} | ({"bits": QLORA_BITS} if key == "qlora" else {})
    if option in _BITS:
        return {"bits": _BITS[option]}
    if key == "frozen" and value in list(Frozen):
        return {"frozen": Frozen(value)}
    if option == "checkpointing":
        return {"checkpointing": True}
    if option in list(Attention):
        return {"attention": Attention(option)}
    if key in _NUMBERS:
        raise InputError(f"{text} has {key}={value}; it must be a whole number, as in {key}=16")
    raise InputError(f"{text} has an unknown option {option!r}; options: {_OPTIONS}")


@cache
def builtin_shapes() -> Mapping[str, Mapping[str, Any]]:
    """Return the configurations of common models by name."""
    file = Path(__file__).with_name("shapes.yaml")
    return cast(Mapping[str, Mapping[str, Any]], load_yaml(file.read_bytes(), str(file)))


@cache
def _hub_ids() -> Mapping[str, str]:
    """Return the names of built-in shapes by lowercase Hub id."""
    file = Path(__file__).with_name("hub_ids.yaml")
    ids = cast(Mapping[str, list[str]], load_yaml(file.read_bytes(), str(file)))
    return {hub_id.lower(): name for name, own in ids.items() for hub_id in own}


def shape_like(name: str) -> str | None:
    """Return the built-in shape with this model name, for any publisher, or None."""
    last = name.lower().rpartition("/")[2]
    if last in builtin_shapes():
        return last
    return next((own for i, own in _hub_ids().items() if i.rpartition("/")[2] == last), None)


def _config_of(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(read_plain(path, MAX_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON ({error}); give a model's config.json") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise InputError(f"{path} has no model_type; give a config.json of transformers")
    return config


def suggested_name(name: str) -> str | None:
    """Return the transformer that a name without prefix probably means, or None."""
    like = shape_like(name)
    return None if like is None else PREFIX + like


def content_of(architecture: str) -> str:
    """Return the canonical name with the fields of the shape, as a cache key.

    Raises:
        InputError, UnknownArchitectureError: As `TransformerName.parse` and `shape`.
    """
    name = TransformerName.parse(architecture)
    return f"{name} {json.dumps(name.shape(), sort_keys=True)}"


def unit_of(architecture: str) -> str:
    """Return the unit of the input size, `px` or `tokens`.

    It depends on the model type of the shape or file, or else on the name.
    """
    shape = None
    with suppress(InputError):  # a deleted file, or a name from another version
        shape = TransformerName.parse(architecture).shape()
    if shape is None:
        return unit_by_name(architecture)
    return "px" if shape["model_type"] in _OF_IMAGES else "tokens"


def refuse_length(architecture: str, tokens: int) -> None:
    """Raise InputError for more tokens than the model's shape has.

    Configurations that leave it to transformers are checked by `library.input_size_of`.
    """
    shape = TransformerName.parse(architecture).shape() or {}
    longest = next((shape[name] for name in LENGTHS if name in shape), None)
    if isinstance(longest, int) and not any(key.endswith("_config") for key in shape):
        refuse_longer(architecture, tokens, longest)


def refuse_longer(architecture: str, tokens: int, longest: int) -> None:
    """Raise InputError for more tokens than the longest sequence of a model."""
    if tokens > longest:
        raise InputError(
            f"{architecture} supports at most {longest:,} tokens, not {tokens:,}; reduce the "
            "sequence length"
        )


LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Fields of configurations with the longest sequence."""

# Model types of image classifiers, listed to avoid importing transformers.
_OF_IMAGES = frozenset({
    "beit", "bit", "clip", "convnext", "convnextv2", "cvt", "data2vec-vision", "deit", "dinat",
    "dinov2", "dinov2_with_registers", "donut-swin", "efficientnet", "focalnet", "hgnet_v2",
    "hiera", "ijepa", "imagegpt", "levit", "metaclip_2", "mobilenet_v1", "mobilenet_v2",
    "mobilevit", "mobilevitv2", "perceiver", "poolformer", "pp_lcnet", "pvt", "pvt_v2", "regnet",
    "resnet", "segformer", "shieldgemma2", "siglip", "siglip2", "swiftformer", "swin", "swinv2",
    "textnet", "timm_wrapper", "vit", "vit_msn",
})  # fmt: skip
