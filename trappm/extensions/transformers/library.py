"""Builds Hugging Face transformers from configurations, with random weights.

Only this module of the package imports transformers and peft. It never downloads anything, and
never runs code of a model repository.
"""

from __future__ import annotations

import copy
import inspect
import logging
import warnings
from collections.abc import Collection, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from trappm.extensions.transformers.model_names import (
    LENGTHS,
    PREFIX,
    QLORA_BITS,
    Frozen,
    TransformerName,
    builtin_shapes,
    refuse_longer,
    shape_like,
)
from trappm.profiler.errors import InputError, TrappmError, from_extra
from trappm.profiler.models.known_names import AdaptedName
from trappm.profiler.models.model_input import Field, NamedInputs
from trappm.profiler.models.pool import Attention
from trappm.profiler.records import Phase

with from_extra("transformers", "a transformer"):
    import transformers
    from transformers import AutoConfig, PretrainedConfig
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import (  # type: ignore[attr-defined]
        CONFIG_MAPPING_NAMES,
    )
    from transformers.pytorch_utils import Conv1D

DEFAULT_LENGTH = 2048
"""Default number of tokens per sample, limited to the model's maximum."""
NOT_MEASURED = "steps with int8, int4 or qlora are predicted, not measured; leave them out"
_MAX_REASON = 200
_TANH = ("gelu_new", "gelu_fast")
"""Activations that Megatron-LM computes in one kernel."""
_TASKS = (
    (auto.AutoModelForImageClassification, auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES),
    (auto.AutoModelForSeq2SeqLM, auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    (auto.AutoModelForMaskedLM, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    (auto.AutoModelForCausalLM, auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
)
"""Training tasks in order of preference; a model is trained for the first supported one."""


def architectures(patterns: Iterable[str]) -> list[str]:
    """Return the canonical names of names and globs over built-in shapes, without duplicates.

    Raises:
        InputError, UnknownArchitectureError: As `TransformerName.parse` and `shape`.
    """
    texts: set[str] = set()
    for pattern in patterns:
        wanted = TransformerName.parse(pattern)
        if wanted.bits is not None:
            raise InputError(NOT_MEASURED)
        names = [name for name in builtin_shapes() if fnmatchcase(name, wanted.name)]
        if not names or wanted.is_builtin:
            texts.add(check(pattern))
        else:
            texts.update(str(replace(wanted, name=name)) for name in names)
    return sorted(texts)


def check(architecture: str) -> str:
    """Return the canonical name of an architecture.

    Raises:
        InputError, UnknownArchitectureError: As `TransformerName.parse` and `shape`.
    """
    name = TransformerName.parse(architecture)
    name.shape()
    return str(name)


def native_input_size(architecture: str) -> int | None:
    """Return the maximum number of tokens or the image size in pixels; None if unlimited.

    Raises:
        InputError: As `create_model`.
    """
    config = _config(TransformerName.parse(architecture))
    return _image_size(config) or _longest(config)


def input_size_of(architecture: str, input_size: int | None) -> int:
    """Return the input size as given, or the model's default of at most 2,048 tokens.

    Raises:
        InputError: The size exceeds the model's maximum; and as `create_model`.
    """
    config = _config(TransformerName.parse(architecture))
    if _image_size(config):
        return input_size or _image_size(config)
    longest = _longest(config)
    if input_size is None:
        return min(longest or DEFAULT_LENGTH, DEFAULT_LENGTH)
    if longest is not None:
        refuse_longer(architecture, input_size, longest)
    return input_size


def create_model(architecture: str, input_size: int) -> nn.Module:
    """Return the model for an input size, with the training options of its name.

    Raises:
        InputError: The sequence is too long, or the configuration is unreadable, unknown to
            transformers, or invalid.
    """
    name = TransformerName.parse(architecture)
    if name.bits is not None and torch.empty(0).device.type != "meta":
        raise InputError(NOT_MEASURED)
    input_size = input_size_of(architecture, input_size)
    config = copy.deepcopy(_config(name))
    if _image_size(config):
        config.image_size = input_size
    if name.attention is Attention.MEGATRON and getattr(config, "activation_function", "") in _TANH:
        config.activation_function = "gelu_pytorch_tanh"
    with _reasons(architecture), _quiet():
        model = _task(config).from_config(config, attn_implementation=str(name.attention))
        if model.loss_type is None:  # classes named LMHeadModel warn about it
            model.loss_type = "ForCausalLM"
        if name.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if name.frozen is Frozen.EMBEDDINGS:
            model.get_input_embeddings().requires_grad_(False)
        elif name.frozen is Frozen.BODY:
            model.base_model.requires_grad_(False)
        # transformers leaves the head, the last layer and some by name unquantized.
        last, _, _ = list(model.named_parameters())[-1][0].rpartition(".")
        kept = (model.get_output_embeddings(), model.get_submodule(last))
        names = set(model._keep_in_fp32_modules or ())
        if name.lora_rank is not None:
            model = with_adapters(model, name.lora_rank)
        if name.bits is not None:
            _quantize(model, name.bits, kept, names)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(
            f"{architecture} has nothing to train: its head shares the frozen embeddings"
        )
    return cast(nn.Module, model)


def inputs(architecture: str, input_size: int) -> NamedInputs:
    """Return the model's inputs; in training they include labels for the model's own loss.

    In inference a decoder reads a prompt, caches keys and values, and scores only the last token.

    Raises:
        InputError: As `create_model`.
    """
    config = _config(TransformerName.parse(architecture))
    task = _task(config)
    if _image_size(config):
        image = Field((config.num_channels, input_size, input_size), torch.float32)
        label = Field((), torch.int64, int(config.num_labels or 2))
        return NamedInputs({"pixel_values": image, "labels": label}, {"pixel_values": image}, {})
    tokens = Field((input_size,), torch.int64, int(config.get_text_config().vocab_size or 0))
    trained = {"input_ids": tokens, "labels": tokens}
    if task is auto.AutoModelForMaskedLM:
        return NamedInputs(trained, {"input_ids": tokens}, {})
    prompt = {"input_ids": tokens}
    if task is auto.AutoModelForSeq2SeqLM:
        prompt["decoder_input_ids"] = Field((1,), torch.int64, tokens.upper)
    settings: dict[Phase, dict[str, Any]] = {
        Phase.TRAIN: {"use_cache": False},
        Phase.INFER: {"use_cache": True},
    }
    if "logits_to_keep" in inspect.signature(_class_of(config).forward).parameters:
        settings[Phase.INFER]["logits_to_keep"] = 1
    return NamedInputs(trained, prompt, settings)


def with_adapters(model: nn.Module, rank: int) -> nn.Module:
    """Return the model with LoRA; raises MissingLibraryError without peft."""
    targets = _targets(model.config.model_type)  # type: ignore[union-attr, arg-type]
    import peft

    adapters = peft.LoraConfig(r=rank, target_modules=targets)
    return cast(nn.Module, peft.get_peft_model(model, adapters))


def adapted(architecture: str, rank: int) -> list[AdaptedName]:
    """Return the model with LoRA, and with LoRA and 4 bits; none if only a part is trained.

    Raises:
        InputError: As `create_model`; or peft is not installed.
    """
    name = TransformerName.parse(architecture)
    if name.lora_rank is not None or name.bits is not None or name.frozen is not None:
        return []
    config = _config(name)
    targets = _targets(config.model_type)
    more = "" if targets is None else f', target_modules="{targets}"'
    lora = f"model = peft.get_peft_model(model, peft.LoraConfig(r={rank}{more}))"
    quantized = (
        f"bits = transformers.BitsAndBytesConfig(load_in_{QLORA_BITS}bit=True,",
        "                                       bnb_4bit_use_double_quant=True)",
        f"model = transformers.{_class_of(config).__name__}.from_pretrained(",
        "    name, quantization_config=bits)",
        "model = peft.prepare_model_for_kbit_training(model)",
    )
    return [
        AdaptedName(f"{method}={rank}", str(replace(name, lora_rank=rank, bits=bits)), python)
        for method, bits, python in (
            ("lora", None, (lora,)),
            ("qlora", QLORA_BITS, (*quantized, lora)),
        )
    ]


def _targets(kind: str) -> str | None:
    with from_extra("transformers", "LoRA"):
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS
    return None if kind in DEFAULTS else "all-linear"


class _PackedProduct(torch.autograd.Function):
    """Linear layer with packed weights; each pass unpacks them in its input's data type."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, packed: Tensor, shape: torch.Size, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.shape = shape
        return nn.functional.linear(inputs, _unpacked(packed, shape, inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (packed,) = ctx.saved_tensors
        return gradient @ _unpacked(packed, ctx.shape, gradient.dtype), None, None, None


def _unpacked(packed: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    count = shape.numel()
    return packed.expand(-1, -(-count // len(packed))).to(dtype).flatten()[:count].view(shape)


class PackedLinear(nn.Module):
    """Stand-in for a frozen linear layer in 8 or 4 bits, with its memory and kernels only.

    Half a byte per weight in 4 bits, and with double quantization a byte for each 64 weights
    (Dettmers et al., QLoRA, 2023, section 3). In 8 bits, each row has a scale in fp32, and weights
    are unpacked for each product, unlike in LLM.int8. Under autocast the product is computed in
    autocast's data type and returned in the input's, as bitsandbytes does.
    """

    def __init__(self, linear: nn.Linear | Conv1D, bits: int) -> None:
        super().__init__()
        weight = linear.weight.T if isinstance(linear, Conv1D) else linear.weight
        self._shape = weight.shape
        count, device = weight.numel(), weight.device
        packed = torch.zeros(-(-count * bits // 8), 1, dtype=torch.uint8, device=device)
        self.weight = nn.Parameter(packed, requires_grad=False)
        scale_bytes = -(-count // 64) if bits == QLORA_BITS else 4 * len(weight)
        scales = torch.zeros(scale_bytes, dtype=torch.uint8, device=device)
        self.register_buffer("scales", scales)
        self.bias = linear.bias

    def forward(self, inputs: Tensor) -> Tensor:
        kind = "cuda" if inputs.is_meta else inputs.device.type
        autocast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if autocast else inputs.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        made: Tensor = _PackedProduct.apply(  # type: ignore[no-untyped-call]
            inputs.to(dtype), self.weight, self._shape, bias
        )
        return made.to(inputs.dtype)


def _quantize(
    model: nn.Module, bits: int, kept: Collection[nn.Module | None], kept_names: Set[str]
) -> None:
    """Freeze and pack the linear layers, except some by themselves or by name, and adapters.

    Raises:
        InputError: The model has experts, which are no linear layers.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() == 3 and parameter.shape[0] > 1:
            raise InputError(f"{name} is not a linear layer; packed experts are not covered")
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            is_linear = isinstance(child, nn.Linear | Conv1D) and "lora_" not in path
            if is_linear and child not in kept and name not in kept_names:
                child.requires_grad_(False)
                setattr(parent, name, PackedLinear(cast(nn.Linear, child), bits))


def megatron_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_settings: Any,
) -> tuple[Tensor, None]:
    """Return causal attention by Megatron-LM's kernels; its softmax applies mask and scale.

    Args:
        module: Attention layer.
        query, key, value: Shape (batch, heads, tokens, width); fewer heads of keys are repeated.
        scaling: Factor of the scores; it has no kernel of its own.
        dropout: Probability that a weight is dropped.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    weights = torch.matmul(query, key.transpose(2, 3)).softmax(-1)
    weights = nn.functional.dropout(weights, dropout, module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), None


transformers.AttentionInterface.register("megatron", megatron_attention)


@lru_cache(maxsize=64)
def _known_config(name: TransformerName, _content: str) -> PretrainedConfig:
    config = _stored_config(name)
    if getattr(config, "quantization_config", None) is not None:
        raise InputError(
            f"{name} has quantized weights, whose kernels are not covered; remove "
            "quantization_config, and add int8 or int4 to the name"
        )
    if name.vocabulary is not None:
        if _image_size(config):
            raise InputError(f"{name} is an image model without a vocabulary; omit the option")
        config.get_text_config().vocab_size = name.vocabulary
    return config


def _stored_config(name: TransformerName) -> PretrainedConfig:
    shape = name.shape()
    with _reasons(str(name)), _quiet():
        if shape is None:
            stored: PretrainedConfig = AutoConfig.from_pretrained(
                name.name, local_files_only=True, trust_remote_code=False
            )
            return stored
        fields = dict(shape)
        kind = fields.pop("model_type")
        if kind not in CONFIG_MAPPING_NAMES:
            raise InputError(
                f"{name} has the model type {kind!r}, which transformers "
                f"{transformers.__version__} does not support; custom model code is never run"
            )
        return AutoConfig.for_model(kind, **fields)


def _config(name: TransformerName) -> PretrainedConfig:
    return _known_config(name, repr(name.shape()))


def _task(config: PretrainedConfig) -> Any:
    """Return the transformers auto class that builds the model with its training head."""
    kind = config.model_type
    for task, kinds in _TASKS:
        if kind in kinds:
            return task
    raise InputError(f"transformers has no language model or image classifier of type {kind!r}")


def _class_of(config: PretrainedConfig) -> type[nn.Module]:
    return cast("type[nn.Module]", _task(config)._model_mapping[type(config)])


def _image_size(config: PretrainedConfig) -> int:
    """Return the image size in pixels; 0 for text models."""
    if config.model_type not in auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:
        return 0
    size = getattr(config, "image_size", 224)
    return int(size if isinstance(size, int) else size[0])


def _longest(config: PretrainedConfig) -> int | None:
    """Return the number of token positions; None for relative positions."""
    if config.model_type in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES and not hasattr(
        config, "max_position_embeddings"
    ):
        return None
    text = config.get_text_config()
    lengths = [getattr(text, name, None) for name in LENGTHS]
    return next((int(length) for length in lengths if isinstance(length, int)), None)


@contextmanager
def _reasons(model: str) -> Iterator[None]:
    """Convert exceptions of transformers and peft into one-line errors about the model."""
    try:
        yield
    except TrappmError:
        raise
    except OSError as error:
        like = shape_like(TransformerName.parse(model).name)
        raise InputError(
            f"no configuration of {model} on this machine, and nothing is downloaded; give the "
            "path of its config.json, such as hf:./config.json"
            + (f", or try {PREFIX}{like}" if like else "")
        ) from error
    except Exception as error:
        if "does not support an attention implementation" in str(error):
            raise InputError(
                f"transformers has no fused attention for {model}; use {model},eager"
            ) from error
        reason = " ".join(str(error).split())[:_MAX_REASON]
        raise InputError(
            f"transformers cannot build {model}: {type(error).__name__}: {reason}; fix its "
            "configuration"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings of transformers, which concern weights that are not loaded."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations and layer layouts
            yield
    finally:
        logger.setLevel(before)
