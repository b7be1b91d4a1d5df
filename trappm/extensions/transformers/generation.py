"""Time and memory of text generation with a decoder.

    >>> from trappm.extensions.transformers.generation import generate
    >>> answer = generate("hf:gpt2", prompt=512, tokens=128, batch_size=8, device="a100")
    >>> answer.fits
    True

Predictions are for the uncompiled modules of transformers in eager PyTorch. They do not apply to
serving engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trappm.extensions.transformers.model_names import TransformerName
from trappm.prediction.fit import (
    MemoryInterval,
    Verdict,
    capacity_of,
    room_text,
    simulated_interval,
)
from trappm.prediction.selection import DEFAULT_DEVICE, device_title, precision_gap
from trappm.profiler.devices.catalogue import process_memory_mib, read_name
from trappm.profiler.errors import InputError
from trappm.profiler.host.environment import independent_of_caller
from trappm.profiler.records import Phase, Precision, member
from trappm.terminal.tables import console, print_line, print_notes, table

MIB = 1 << 20
MAX_TOKENS = 1 << 24
"""Largest number of tokens or sequences, to catch typing errors."""
PROMPT_ERRORS, TOKEN_ERRORS = (0.921, 1.079), (0.903, 1.108)
"""90 % intervals of measured / predicted at held-out batch sizes; that of prompts includes the
differences between models."""
LABELLED = (
    "The interval comes from published steps of one model on one machine, "
    "with a host CPU up to twice or half as fast."
)
UNLABELLED = (
    "No decode steps were measured on this card in this precision. The interval comes from other "
    "inference on held-out cards, with a host CPU up to twice or half as fast."
)
Interval = tuple[float, float]


class GenerationFactors(NamedTuple):
    """Constants of generation, in addition to those of the device.

    `python -m research fit-priors decoding` prints them and the errors above; their source is
    Llama-2-7B in fp16 on an A100 (docs/research/step_time.md).
    """

    dispatch_us: float = 18.0
    """Host time per operator without gradients."""
    products: float = 1.36
    """Factor on the products of prefill."""
    copies: float = 2.04
    """Factor on the copies of the cache in decode steps."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Predicted time and memory of text generation, with 90 % intervals."""

    model: str
    device: str
    device_name: str
    """Display name of the device, marked if it is the default."""
    prompt: int
    tokens: int
    batch_size: int
    precision: str
    attention: str
    first_token_ms: float
    first_token_interval_ms: Interval
    token_ms: float
    """Mean time per token after the first; NaN for a single token."""
    token_interval_ms: Interval
    token_device_ms: float
    """Mean time per later token without waiting for the host, only the GPU's kernels."""
    tokens_per_s: float
    """Throughput of all sequences, from the start of the prompt to the last token."""
    total_s: float
    weights_mib: float
    cache_mib: float
    """Size of the cache after the last step, which does not contain the last token."""
    activations_mib: float
    """Peak memory of the allocator in addition to weights and cache."""
    context_mib: float
    capacity_mib: float
    remarks: tuple[str, ...]

    @property
    def memory_mib(self) -> float:
        return self.weights_mib + self.cache_mib + self.activations_mib + self.context_mib

    @property
    def memory(self) -> MemoryInterval:
        """Memory with the interval of a simulated memory."""
        return simulated_interval(self.memory_mib)

    @property
    def verdict(self) -> Verdict:
        """Return the verdict on the memory (`trappm.prediction.fit`)."""
        return self.memory.verdict(self.capacity_mib)

    @property
    def fits(self) -> bool:
        return self.verdict is Verdict.FITS

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        values = {**asdict(self), "memory_mib": self.memory_mib}
        values |= {"fits": self.fits, "verdict": self.verdict}
        if self.tokens == 1:
            values |= dict.fromkeys(("token_ms", "token_interval_ms", "token_device_ms"))
        return values


@independent_of_caller
def generate(
    model: str,
    *,
    prompt: int = 512,
    tokens: int = 128,
    batch_size: int = 1,
    device: str | None = None,
    precision: str = Precision.BF16,
) -> Generation:
    """Predict time and memory of text generation with a decoder of transformers.

    Args:
        model: Name such as `hf:llama-2-7b`, or `hf:llama-2-7b,eager` for unfused attention.
        prompt: Number of tokens per prompt.
        tokens: Number of tokens generated per prompt.
        batch_size: Number of sequences per batch, all of the same length.
        device: GPU of the catalogue (default: `DEFAULT_DEVICE`).
        precision: Precision of weights and cache, `bf16` or `fp32`.

    Raises:
        InputError, UnknownArchitectureError: An argument is invalid.
        UnsupportedModelError: A step cannot be traced, or the model has a nonstandard cache.
    """
    which = member("precision", Precision, precision)
    if which not in (Precision.BF16, Precision.FP32):
        raise InputError(f"precision is {which}; generation supports only bf16 and fp32")
    for name, value in (("prompt", prompt), ("tokens", tokens), ("batch size", batch_size)):
        if not 1 <= value <= MAX_TOKENS:
            raise InputError(f"{name} is {value}; it must be from 1 to {MAX_TOKENS:,}")
    if TransformerName.parse(model).bits is not None:
        raise InputError(f"generation with packed weights is not covered: {model}")
    is_default, device = device is None, device or DEFAULT_DEVICE
    capacity_mib = capacity_of(device)
    if gap := precision_gap(device, which):
        raise InputError(gap)
    from trappm.extensions.transformers.decoder import Decoder

    decoder = Decoder(model, prompt + tokens, batch_size, which)
    last = prompt + tokens - 2
    """Number of tokens before the input token of the last step."""
    contexts = sorted({prompt, last, *(w for w in decoder.windows if prompt < w < last)})
    prefill = decoder.prefill(prompt)
    decodes = [decoder.decode(context) for context in contexts] if tokens > 1 else []
    steps = [prefill, *decodes]
    median, low, high, alone = step_times_ms([s.kernels for s in steps], batch_size, device, which)

    def mean(times: npt.NDArray[np.float64]) -> float:
        """Return the mean of all decode steps, interpolated between the traced ones."""
        if not decodes:
            return float("nan")
        return float(np.interp(np.arange(prompt, last + 1), contexts, times[1:]).mean())

    token_ms = mean(median)
    total_s = (float(median[0]) + (token_ms * (tokens - 1) if decodes else 0.0)) / 1000
    weights_mib = decoder.weight_bytes / MIB
    cache_mib = decoder.cache_bytes(prompt + tokens - 1) / MIB
    peak_mib = max(step.memory.reserved_with_workspace_mib for step in steps)
    return Generation(
        model=decoder.architecture,
        device=device,
        device_name=f"{device_title(device)} (default)" if is_default else device_title(device),
        prompt=prompt,
        tokens=tokens,
        batch_size=batch_size,
        precision=which.value,
        attention=decoder.attention,
        first_token_ms=float(median[0]),
        first_token_interval_ms=(float(low[0]), float(high[0])),
        token_ms=token_ms,
        token_interval_ms=(mean(low), mean(high)),
        token_device_ms=mean(alone),
        tokens_per_s=tokens * batch_size / total_s,
        total_s=total_s,
        weights_mib=weights_mib,
        cache_mib=cache_mib,
        activations_mib=max(peak_mib - weights_mib - cache_mib, 0.0),
        context_mib=process_memory_mib(device, Phase.INFER),
        capacity_mib=capacity_mib,
        remarks=(LABELLED if _is_labelled(device, which) else UNLABELLED,),
    )


def _is_labelled(device: str, precision: Precision) -> bool:
    return read_name(device).model == "a100" and not precision.is_fp32


def step_times_ms(
    steps: Sequence[Any],
    batch_size: int,
    device: str,
    precision: Precision,
    factors: GenerationFactors = GenerationFactors(),  # noqa: B008  (immutable)
) -> tuple[npt.NDArray[np.float64], ...]:
    """Return median, low, high and GPU-only median of each step, shape (n,) each.

    Published prefill and decode steps give the errors on the A100 in 16 bits, and whole language
    models those of prefill in fp32. Other errors are those of any inference on held-out cards.
    """
    from trappm.extensions.transformers.model_heads import (
        OTHER_TIMES,
        errors_of,
        language_model_head,
        transformer_times,
    )
    from trappm.learner.heads.physics_heads import Basis, known_of_others
    from trappm.learner.interface import Workload
    from trappm.profiler.devices.catalogue import CPU, known_spec
    from trappm.profiler.records import Graph
    from trappm.profiler.records.step_scope import StepScope

    spec = known_spec(device)
    if spec is None or spec is CPU:
        raise InputError(f"the speed of {device} is unknown; name a GPU, such as a100")
    others, _ = known_of_others()
    known = transformer_times(device, precision, of_2023=True)  # as the fitted steps are
    any_other = others.step_time[Basis.KERNELS, Phase.INFER]
    of_token = replace(known or OTHER_TIMES, dispatch_us=factors.dispatch_us, copies=factors.copies)
    of_prompt = replace(of_token, products=factors.products * of_token.products, copies=1.0)
    prompt_errors = token_errors = any_other
    if _is_labelled(device, precision):
        prompt_errors = errors_of(replace(of_prompt, errors=PROMPT_ERRORS))
        token_errors = errors_of(replace(of_token, errors=TOKEN_ERRORS))
    elif known is not None and precision is Precision.FP32:
        prompt_errors = errors_of(known)
    workloads = [
        Workload(
            graph=Graph.empty(batch_size),
            precision=precision,
            phase=Phase.INFER,
            kernels=kernels,
        )
        for kernels in steps
    ]
    heads = (
        language_model_head(others, device, spec, of_prompt, prompt_errors),
        language_model_head(others, device, spec, of_token, token_errors),
    )
    made = [
        head.predict(part) for head, part in zip(heads, (workloads[:1], workloads[1:]), strict=True)
    ]
    keeps_up = StepScope(waits_for_host=False)
    alone = np.exp(heads[1].prior.log_values([replace(w, scope=keeps_up) for w in workloads]))
    both = [
        np.concatenate([np.atleast_1d(getattr(part, name)) for part in made])
        for name in ("median", "low", "high")
    ]
    return (*both, alone)


def print_generation(made: Generation, *, explain: bool = False) -> None:
    """Print a summary, a table of times with intervals, and a table of memory."""
    print_line(_answer(made))
    times = [_time("first token", made.first_token_ms, made.first_token_interval_ms)]
    if made.tokens > 1:
        times.append(_time("each later token", made.token_ms, made.token_interval_ms))
        times.append(("  with CUDA graphs", f"{made.token_device_ms:,.1f}", ""))
    memory = {
        "weights": made.weights_mib,
        "cache at the end": made.cache_mib,
        "activations and gaps": made.activations_mib,
        "CUDA's context": made.context_mib,
    }
    out = console()
    out.print(table("", ("time", "ms", "90 % interval"), times))
    out.print(table("", ("memory", "GiB"), [(k, f"{v / 1024:,.2f}") for k, v in memory.items()]))
    print_notes(made.remarks, explain=explain)


def _answer(made: Generation) -> str:
    many = f"{made.batch_size:,} prompts" if made.batch_size > 1 else "a prompt"
    room = room_text(made.verdict, made.device_name, made.memory, made.capacity_mib)
    return (
        f"{room}. {made.model} reads {many} of {made.prompt:,} tokens and writes {made.tokens:,} "
        f"in {made.total_s:.3g} s in {made.precision}, {made.tokens_per_s:,.0f} tokens per second."
    )


def _time(what: str, median_ms: float, interval_ms: Interval) -> tuple[str, str, str]:
    low, high = interval_ms
    return what, f"{median_ms:,.1f}", f"{low:,.1f} to {high:,.1f}"
