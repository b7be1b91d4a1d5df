"""Traced steps of a decoder: prefill of the whole prompt, then one decode step per token.

Steps are traced on the meta device like other steps. Cache sizes come from the cache objects of
transformers, so grouped-query attention and sliding windows need no formulas here.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn

from trappm.extensions.transformers.model_names import TransformerName, is_transformer
from trappm.profiler.errors import InputError, UnsupportedModelError, one_line
from trappm.profiler.memory.simulation import MIB, SimulatedMemory, simulate_memory
from trappm.profiler.models.model_input import Inputs, NamedInputs
from trappm.profiler.models.on_meta import on_meta
from trappm.profiler.models.sources import source_of
from trappm.profiler.records import Phase, Precision
from trappm.profiler.traced_step import Allocations, Size, StepKernels, TraceSettings
from trappm.profiler.tracing.tracer import Tracer


@dataclass(frozen=True, eq=False)
class DecoderStep:
    """Prefill or decode step of a batch."""

    allocations: Allocations
    kernels: StepKernels
    batch_size: int
    context_bytes: int
    """Cache of one layer before the step, which is alive while the next cache is allocated."""

    @property
    def flops(self) -> int:
        """Return the FLOP of products, two per multiply-accumulate."""
        table = self.kernels.table
        flops = table.sizes[:, Size.FLOPS] @ (1, self.batch_size)
        return int((flops * table.counts).sum())

    @cached_property
    def memory(self) -> SimulatedMemory:
        """Return the allocator's peak memory, including weights and cache."""
        simulated = simulate_memory(self.allocations, self.batch_size)
        context_mib = self.context_bytes / MIB
        return SimulatedMemory(
            live_mib=simulated.live_mib + context_mib,
            reserved_mib=simulated.reserved_mib + context_mib,
            reserved_with_workspace_mib=simulated.reserved_with_workspace_mib + context_mib,
        )


@dataclass(frozen=True)
class _Tokens(Inputs):
    """Tokens of a step and the cache before it."""

    inputs: NamedInputs
    cache: Any = field(default=None, hash=False)
    """Cache before the step; None for the prompt."""

    def in_phase(self, phase: Phase) -> Self:
        return type(self)(self.inputs.in_phase(phase), self.cache)

    def tensors(self, batch_size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = self.inputs.tensors(batch_size)
        if self.cache is None:
            return args, kwargs
        # A step modifies its cache, so each step gets a copy.
        return args, {**kwargs, "past_key_values": copy.deepcopy(self.cache)}

    def values(self, batch_size: int) -> list[Tensor | None]:
        return self.inputs.values(batch_size)

    def __str__(self) -> str:
        return str(self.inputs)


class Decoder:
    """A transformer that generates text token by token.

    Args:
        architecture: Name such as `hf:llama-2-7b,eager`.
        length: Number of tokens of prompt and generated text.
        batch_size: Number of sequences per batch.
        precision: Precision of weights and cache, `fp32` or `bf16`.

    Raises:
        InputError: The model is not a decoder, or `length` exceeds its limit; and as
            `sources.create_model`.
    """

    def __init__(
        self, architecture: str, length: int, batch_size: int, precision: Precision
    ) -> None:
        if not is_transformer(architecture):
            raise InputError(f"{architecture} is not a decoder; name one, such as hf:gpt2")
        source = source_of(architecture)
        self.architecture = source.check(architecture)
        longest = source.native_input_size(architecture)
        fields = self._inputs(1)
        caches = fields.settings.get(Phase.INFER, {}).get("use_cache")
        if not caches or list(fields.infer) != ["input_ids"]:
            raise InputError(
                f"{architecture} is not a decoder-only model; name one, such as hf:gpt2 or "
                "hf:llama-2-7b"
            )
        if longest is not None and length > longest:
            raise InputError(
                f"prompt and generated text have {length:,} tokens, but {architecture} supports "
                f"at most {longest:,}; reduce one of them"
            )
        self.batch_size = batch_size
        self._precision = precision
        self.model: nn.Module = on_meta(self.architecture, length, precision=precision).eval()

    @property
    def attention(self) -> str:
        return TransformerName.parse(self.architecture).attention.value

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all parameters; shared parameters count once."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    @property
    def windows(self) -> tuple[int, ...]:
        """Return the distinct sliding window lengths of the layers, in tokens."""
        layers = getattr(self._cache(1), "layers", ())
        return tuple(sorted({w for layer in layers if (w := getattr(layer, "sliding_window", 0))}))

    def cache_bytes(self, context: int) -> int:
        """Return the bytes of keys and values of all layers after `context` tokens."""
        return sum(_layer_bytes(self._cache(context)))

    def prefill(self, prompt: int) -> DecoderStep:
        """Return the step that reads a prompt of n tokens and generates the first token."""
        return self._step(_Tokens(self._inputs(prompt)), 0)

    def decode(self, context: int) -> DecoderStep:
        """Return the step that generates one token per sequence after `context` tokens."""
        cache = self._cache(context)
        return self._step(_Tokens(self._inputs(1), cache), max(_layer_bytes(cache)))

    def _inputs(self, length: int) -> NamedInputs:
        inputs = source_of(self.architecture).inputs(self.architecture, length)
        assert isinstance(inputs, NamedInputs)  # noqa: S101  (of a transformer)
        return inputs

    def _step(self, inputs: _Tokens, context_bytes: int) -> DecoderStep:
        size = self.batch_size
        settings = TraceSettings(self._precision)
        trace = Tracer(self.model, inputs, settings, Phase.INFER, (size, size)).trace()
        if trace.allocations is None or trace.kernels is None:
            raise UnsupportedModelError(f"{self.architecture}: {trace.refusal}")
        return DecoderStep(trace.allocations, trace.kernels, size, context_bytes)

    def _cache(self, context: int) -> Any:
        """Return the cache of transformers after `context` tokens, without values."""
        if context not in self._caches:
            _, tokens = self._inputs(context).in_phase(Phase.INFER).batch(self.batch_size)
            try:
                with torch.inference_mode():
                    cache = self.model(**tokens).past_key_values
                self._caches[context] = _without_storage(cache)
            except Exception as error:
                raise UnsupportedModelError(
                    f"{self.architecture} has no standard key-value cache of transformers: "
                    f"{one_line(error)}"
                ) from error
        return self._caches[context]

    @cached_property
    def _caches(self) -> dict[int, Any]:
        return {}


def _without_storage(cache: Any) -> Any:
    """Return the cache with cloned keys and values, so that windows are not views of all tokens."""
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
    return cache


def _layer_bytes(cache: Any) -> Sequence[int]:
    return [layer.keys.nbytes + layer.values.nbytes for layer in cache.layers]
