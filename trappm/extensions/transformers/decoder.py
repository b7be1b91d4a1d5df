"""Steps by which a decoder writes: one over the whole prompt, then one a token with its cache.

Traced on the meta device, as other steps are. The cache is the one that transformers makes: its
shapes are read, so heads that share keys and windows that slide need no formulas here.
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
from trappm.profiler.models.model_input import NamedInputs
from trappm.profiler.models.on_meta import on_meta
from trappm.profiler.models.sources import source_of
from trappm.profiler.records import MemoryFormat, Phase, Precision
from trappm.profiler.simulation.kernel_profile import KernelTable, Size
from trappm.profiler.simulation.memory_simulation import MIB, SimulatedMemory, simulate_memory
from trappm.profiler.simulation.step_trace import StepTrace
from trappm.profiler.tracing.tracer import StepOptions, Tracer


@dataclass(frozen=True, eq=False)
class DecoderStep:
    """One step of a batch: of a prompt, or of a token each behind a context."""

    trace: StepTrace
    kernels: KernelTable
    batch_size: int
    context_bytes: int
    """Of the cache that one layer has before the step, while the next one is made."""

    @property
    def flops(self) -> int:
        """Two for each multiply-accumulate; of kernels that are products."""
        flops = self.kernels.sizes[:, Size.FLOPS] @ (1, self.batch_size)
        return int((flops * self.kernels.counts).sum())

    @cached_property
    def memory(self) -> SimulatedMemory:
        """That of the allocator at its peak, weights and cache included."""
        simulated = simulate_memory(self.trace, self.batch_size)
        beside_mib = self.context_bytes / MIB
        return SimulatedMemory(
            live_mib=simulated.live_mib + beside_mib,
            reserved_mib=simulated.reserved_mib + beside_mib,
            reserved_with_workspace_mib=simulated.reserved_with_workspace_mib + beside_mib,
        )


@dataclass(frozen=True)
class _Tokens:
    """A step's tokens, and the cache of those before; `profiler.models.model_input.Inputs`."""

    inputs: NamedInputs
    cache: Any = field(default=None, hash=False)
    """None before the prompt."""

    def in_phase(self, phase: Phase) -> Self:
        return type(self)(self.inputs.in_phase(phase), self.cache)

    def batch(
        self, batch_size: int, memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = self.inputs.batch(batch_size, memory_format)
        if self.cache is None:
            return args, kwargs
        # A step adds to its cache, so each gets its own.
        return args, {**kwargs, "past_key_values": copy.deepcopy(self.cache)}

    def values(self, batch_size: int) -> list[Tensor | None]:
        return self.inputs.values(batch_size)

    def __str__(self) -> str:
        return str(self.inputs)


class Decoder:
    """A transformer that writes token by token.

    Args:
        architecture: such as `hf:llama-2-7b,eager`.
        length: prompt and answer, in tokens.
        batch_size: sequences that are written at once.
        precision: `fp32`, or `bf16`, of which weights and cache are then.

    Raises:
        InputError: no decoder, or longer than it can read; and as `sources.create_model`.
    """

    def __init__(
        self, architecture: str, length: int, batch_size: int, precision: Precision
    ) -> None:
        if not is_transformer(architecture):
            raise InputError(f"{architecture} writes no tokens; name a decoder, such as hf:gpt2")
        source = source_of(architecture)
        self.architecture = source.check(architecture)
        longest = source.native_input_size(architecture)
        fields = self._inputs(1)
        caches = fields.settings.get(Phase.INFER, {}).get("use_cache")
        if not caches or list(fields.infer) != ["input_ids"]:
            raise InputError(
                f"{architecture} is no decoder alone, so it writes no token after token; name one, "
                "such as hf:gpt2 or hf:llama-2-7b"
            )
        if longest is not None and length > longest:
            raise InputError(
                f"prompt and answer are {length:,} tokens, and {architecture} takes at most "
                f"{longest:,}; shorten one of them"
            )
        self.batch_size = batch_size
        self._precision = precision
        self.model: nn.Module = on_meta(self.architecture, length, precision=precision).eval()

    @property
    def attention(self) -> str:
        return TransformerName.parse(self.architecture).attention.value

    @property
    def weight_bytes(self) -> int:
        """Of all parameters; those that two layers share once."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    @property
    def windows(self) -> tuple[int, ...]:
        """Contexts from which on layers look at the last tokens only."""
        layers = getattr(self._cache(1), "layers", ())
        return tuple(sorted({w for layer in layers if (w := getattr(layer, "sliding_window", 0))}))

    def cache_bytes(self, context: int) -> int:
        """Of keys and values of all layers, after so many tokens of each sequence."""
        return sum(_layer_bytes(self._cache(context)))

    def prefill(self, prompt: int) -> DecoderStep:
        """The step that reads a prompt of so many tokens and writes the first token."""
        return self._step(_Tokens(self._inputs(prompt)), 0)

    def decode(self, context: int) -> DecoderStep:
        """The step that writes one more token of each sequence, after so many."""
        cache = self._cache(context)
        return self._step(_Tokens(self._inputs(1), cache), max(_layer_bytes(cache)))

    def _inputs(self, length: int) -> NamedInputs:
        inputs = source_of(self.architecture).inputs(self.architecture, length)
        assert isinstance(inputs, NamedInputs)  # noqa: S101  (of a transformer)
        return inputs

    def _step(self, inputs: _Tokens, context_bytes: int) -> DecoderStep:
        size = self.batch_size
        options = StepOptions(precision=self._precision)
        trace, kernels = Tracer(self.model, inputs, options, (size, size)).phase(Phase.INFER)
        return DecoderStep(trace, kernels, size, context_bytes)

    def _cache(self, context: int) -> Any:
        """As transformers leaves it behind when it has read so many tokens, without values."""
        if context not in self._caches:
            _, tokens = self._inputs(context).in_phase(Phase.INFER).batch(self.batch_size)
            try:
                with torch.inference_mode():
                    cache = self.model(**tokens).past_key_values
                self._caches[context] = _without_storage(cache)
            except Exception as error:
                raise UnsupportedModelError(
                    f"{self.architecture} keeps no keys and values as transformers' caches do: "
                    f"{one_line(error)}"
                ) from error
        return self._caches[context]

    @cached_property
    def _caches(self) -> dict[int, Any]:
        return {}


def _without_storage(cache: Any) -> Any:
    """The same cache, whose windows are no longer views of all that was read."""
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
    return cache


def _layer_bytes(cache: Any) -> Sequence[int]:
    return [layer.keys.nbytes + layer.values.nbytes for layer in cache.layers]
