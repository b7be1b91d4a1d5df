"""Milliseconds of Transformer-XL's inference: a segment of tokens behind a cache of earlier ones.

The nearest to decoding that any sheet has: small steps of eager PyTorch, for which hosts of
DGX A100 (DeepLearningExamples, NGC 20.06) launch several hundred kernels. Nothing is fitted. The
module has what one of its steps computes, but for the rare classes of its adaptive softmax.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.learner.language.pretraining import known_constants
from benchmarks.learner.language.rows import Judged, Row
from trappm.learner.physics.device_specs import spec_of
from trappm.learner.physics.kernel_terms import terms_of
from trappm.learner.physics.kernel_times import Lookup, times_of
from trappm.learner.physics.transformer_times import transformer_times
from trappm.learner.workload import Workload
from trappm.profiler.models.model_input import ExampleInputs
from trappm.profiler.records import Graph, MemoryFormat, Phase, Precision
from trappm.profiler.simulation.kernel_profile import KernelProfile
from trappm.profiler.tracing.tracer import Tracer

FREQUENT = 20_000
"""Words of the adaptive softmax's first part."""


@dataclass(frozen=True)
class Size:
    """Of a published configuration (wt103)."""

    layers: int
    width: int
    heads: int
    inner: int
    tokens: int
    """Of a segment."""
    memory: int
    """Tokens before it."""


SIZES = {
    "Transformer-XL base": Size(16, 512, 8, 2048, 64, 640),
    "Transformer-XL large": Size(18, 1024, 16, 4096, 128, 1600),
}


class Layer(nn.Module):
    """Attention with relative positions (Dai et al. 2019), and a perceptron."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.places = nn.Linear(size.width, size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.up, self.down = nn.Linear(size.width, size.inner), nn.Linear(size.inner, size.width)
        self.norms = nn.ModuleList(nn.LayerNorm(size.width) for _ in range(2))
        self.biases = nn.Parameter(torch.zeros(2, size.width))

    def forward(self, x: Tensor, memory: Tensor, r: Tensor, mask: Tensor) -> Tensor:
        size, (batch, tokens, _) = self.size, x.shape
        q, k, v = self.qkv(torch.cat([memory, x], 1)).chunk(3, dim=-1)
        q, r = q[:, -tokens:], self.places(r)

        def heads(t: Tensor) -> Tensor:
            return t.view(*t.shape[:-1], size.heads, -1).transpose(-3, -2)

        content = heads(q + self.biases[0]) @ heads(k).transpose(-2, -1)
        where = heads(q + self.biases[1]) @ heads(r.expand(batch, -1, -1)).transpose(-2, -1)
        padded = torch.cat([where.new_zeros(*where.shape[:-1], 1), where], -1)
        shifted = padded.view(batch, size.heads, -1, tokens)[:, :, 1:].reshape(where.shape)
        scores = ((content + shifted) * 0.125).masked_fill(mask, -65000.0)
        y = F.softmax(scores, -1) @ heads(v)
        x = self.norms[0](x + self.out(y.transpose(1, 2).reshape(x.shape)))
        y = self.norms[1](x + self.down(F.relu(self.up(x))))
        self.kept = torch.cat([memory, x], 1)[:, -size.memory :].clone()
        return y


class TransformerXL(nn.Module):
    """Tokens of a segment in, the losses of the next ones out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(FREQUENT, size.width)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.head = nn.Linear(size.width, FREQUENT)
        whole = size.tokens + size.memory
        self.register_buffer("places", torch.zeros(1, whole, size.width))
        self.register_buffer("mask", torch.zeros(size.tokens, whole, dtype=torch.bool))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        memory = x.new_empty(len(tokens), self.size.memory, self.size.width)
        for layer in self.layers:
            x = layer(x, memory, self.places, self.mask)
        return F.log_softmax(self.head(x), -1).gather(-1, tokens[..., None])


@cache
def kernels(model: str, precision: Precision) -> KernelProfile:
    with torch.device("meta"):
        module = TransformerXL(SIZES[model]).eval()
        tokens = torch.zeros(2, SIZES[model].tokens, dtype=torch.long)
    module = module if precision is Precision.FP32 else module.bfloat16()
    _, table = Tracer(module, ExampleInputs.of(tokens), None, (2, 3)).phase(Phase.INFER)
    return KernelProfile(
        train=table, infer=table, parameter_tensors=0, parameters=0, precision=precision,
        memory_format=MemoryFormat.CONTIGUOUS,
    )  # fmt: skip


def judged(rows: Sequence[Row]) -> Iterator[Judged]:
    """Rows of an A100 in 16 bits, eager and by TorchScript: of each setting the slower is eager."""
    device = "a100"
    spec = spec_of(device)
    times = transformer_times(device, Precision.BF16)
    assert times is not None
    constants = times.moved(known_constants(device), spec)
    slowest: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row["model"] in SIZES and row["device"] == "A100-40GB" and row["precision"] == "amp":
            key = row["model"], row["per_gpu_batch"]
            before = slowest.setdefault(key, row)
            if float(row["latency_avg_ms"]) > float(before["latency_avg_ms"]):
                slowest[key] = row
    for (model, batch), row in slowest.items():
        workload = Workload(
            graph=Graph.empty(round(float(batch))),
            kernels=kernels(model, Precision.BF16),
            phase=Phase.INFER,
        )
        yield Judged(
            group="Transformer-XL a100, eager",
            model=model,
            what=f"batch {float(batch):g}",
            measured=float(row["latency_avg_ms"]),
            predicted=float(times_of(terms_of([workload], spec), Lookup(constants), spec).total()),
        )
