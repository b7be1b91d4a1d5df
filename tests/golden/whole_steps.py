"""Steps of all kinds of operators, for recordings of their graphs, kernels and allocations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from feature_zoo import Convolutions, OtherOperators
from foreign_modules import MODULES
from small_modules import Function
from torch import Tensor, nn

from trappm.profiler.models.model_input import ExampleInputs
from trappm.profiler.models.on_meta import on_meta
from trappm.profiler.records import Execution, MemoryFormat, Phase, Precision
from trappm.profiler.trace import trace
from trappm.profiler.traced_step import Trace, TraceSettings
from trappm.profiler.tracing.losses import default_loss
from trappm.profiler.tracing.tracer import Tracer

SIZE = 8
"""Pixels of an image."""
WIDTH = 12
"""Channels of what the operators below are called with: (B, 12, 8, 8), or of 64 tokens."""

LENGTHS = torch.full((2,), 64)
"""Of the sequences of two samples."""

OF_IMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "activations": lambda x: F.elu(x) + F.leaky_relu(x) * F.hardsigmoid(x) - F.silu(F.mish(x)),
    "arithmetic": lambda x: (2 - x) / (1 + x * x) + x.clamp(-1, 1) + x.clamp(min=0).sqrt(),
    "arithmetic of three": lambda x: torch.addcmul(x, x, x, value=0.5).lerp(x.tanh(), 0.1),
    "where": lambda x: torch.where(x > 0, x, -x).masked_fill(x > 2, 0.0),
    "reductions": lambda x: x / x.norm(dim=1, keepdim=True) + x.var((2, 3), keepdim=True),
    "deviation": lambda x: (x - x.mean(1, keepdim=True)) * (x.std(1, keepdim=True) + 1).rsqrt(),
    "extrema": lambda x: x - x.amax((2, 3), keepdim=True) + x.max(1, keepdim=True).values,
    "softmax": lambda x: x.softmax(1) * x.log_softmax(-1).exp() + x.logsumexp(1, keepdim=True),
    "shapes": lambda x: x.flatten(2).transpose(1, 2).reshape(-1, 8, 8, 12).permute(0, 3, 1, 2),
    "parts": lambda x: torch.cat([*x.chunk(3, 1)[1:], x[:, :4]], 1) + torch.stack(x.unbind(2), 2),
    "windows": lambda x: F.fold(F.unfold(x, 3, padding=1), (8, 8), 3, padding=1) + x.roll(2, 3),
    "padding": lambda x: F.pad(F.pad(x, (1, 1, 0, 2), mode="reflect"), (0, -2, 1, 1))[..., 2:-2, :],
    "indices": lambda x: x.index_select(1, torch.arange(11, -1, -1, device=x.device)).gather(
        1, torch.zeros_like(x, dtype=torch.long)
    ),
    "products": lambda x: torch.einsum("bchw,bdhw->bcd", x, x) @ x.flatten(2) / 8,
    "pools": lambda x: F.max_pool2d(x, 3, 1, 1) + F.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
    "adaptive pools": lambda x: x * F.adaptive_avg_pool2d(x, 1) + F.adaptive_max_pool2d(x, (8, 8)),
    "resizing": lambda x: F.interpolate(F.interpolate(x, scale_factor=2, mode="bilinear"), size=8),
    "shuffles": lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2) + F.channel_shuffle(x, 3),
    "dropouts": lambda x: F.dropout(x, 0.2) + F.dropout2d(x, 0.1),
    "grid": lambda x: F.grid_sample(
        x, F.affine_grid(torch.eye(2, 3, device=x.device).repeat(len(x), 1, 1), list(x.shape))
    ),
    "sorting": lambda x: x.sort(1).values + x.topk(3, 1).values.sum(1, keepdim=True),
    "sums along": lambda x: x.cumsum(2) + x.flip(3) + x.prod(1, keepdim=True),
    "in place": lambda x: x.clone().mul_(2).add_(1).relu_(),
    "repeats": lambda x: x.repeat(1, 2, 1, 1)[:, ::2] + x[:, :1].expand_as(x),
    "types": lambda x: x.half().float() * x.double().float(),
    "fourier": lambda x: torch.fft.irfft2(torch.fft.rfft2(x), s=(8, 8)),
    "distances": lambda x: torch.cdist(x.flatten(2), x.flatten(2)),
}  # fmt: skip
OF_TOKENS: dict[str, tuple[Callable[[Any, Tensor], Tensor], dict[str, Any]]] = {
    "norms": (
        lambda self, x: self.rms(self.layer(x)),
        {"layer": nn.LayerNorm(WIDTH), "rms": nn.RMSNorm((64, WIDTH))},
    ),
    "attention": (
        lambda self, x: self.attention(x, x, x, need_weights=False)[0],
        {"attention": nn.MultiheadAttention(WIDTH, 3, batch_first=True)},
    ),
    "causal attention": (
        lambda self, x: F.scaled_dot_product_attention(
            *self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4), is_causal=True
        ).transpose(1, 2).flatten(2),
        {"qkv": nn.Linear(WIDTH, 3 * WIDTH)},
    ),
    "masked attention": (
        lambda self, x: F.scaled_dot_product_attention(x, x, x, self.mask),
        {"mask": nn.Parameter(torch.zeros(64, 64))},
    ),
    "transformer": (
        lambda self, x: self.layer(x),
        {"layer": nn.TransformerEncoderLayer(WIDTH, 2, 20, 0.1, "gelu", batch_first=True)},
    ),
    "gates": (lambda self, x: F.glu(self.wide(x)), {"wide": nn.Linear(WIDTH, 2 * WIDTH)}),
    "LSTM": (lambda self, x: self.cells(x)[0], {"cells": nn.LSTM(WIDTH, 12, 2, batch_first=True)}),
    "GRU both ways": (
        lambda self, x: self.cells(x)[0],
        {"cells": nn.GRU(WIDTH, 6, batch_first=True, bidirectional=True)},
    ),
    "RNN": (lambda self, x: self.cells(x)[0], {"cells": nn.RNN(WIDTH, WIDTH, batch_first=True)}),
    "sequences": (
        lambda self, x: self.up(self.down(x.mT)).mT,
        {"down": nn.Conv1d(WIDTH, 8, 4, 2, 1), "up": nn.ConvTranspose1d(8, WIDTH, 4, 2, 1)},
    ),
    "CTC": (
        lambda self, x: x * F.ctc_loss(
            x.log_softmax(-1).transpose(0, 1), torch.ones((len(x), 5), dtype=torch.long), LENGTHS,
            LENGTHS // 13,
        ),
        {},
    ),
    "bilinear": (lambda self, x: self.two(x, x), {"two": nn.Bilinear(WIDTH, WIDTH, WIDTH)}),
    "tables": (
        lambda self, x: x + self.rows(torch.arange(64, device=x.device)) + self.places,
        {"rows": nn.Embedding(64, WIDTH), "places": nn.Parameter(torch.zeros(1, 64, WIDTH))},
    ),
}  # fmt: skip
OF_LAYERS: dict[str, nn.Module] = {
    "convolutions": nn.Sequential(
        nn.Conv2d(WIDTH, 8, (1, 3), padding=(0, 1)), nn.Conv2d(8, 16, 3, 2, 1, groups=4),
        nn.Conv2d(16, 16, 3, padding=2, dilation=2, bias=False),
        nn.ConvTranspose2d(16, WIDTH, 4, 2, 1),
    ),
    "norms of images": nn.Sequential(
        nn.BatchNorm2d(WIDTH), nn.GroupNorm(3, WIDTH), nn.InstanceNorm2d(WIDTH, affine=True),
        nn.LocalResponseNorm(3),
    ),
    "volumes": nn.Sequential(
        nn.Unflatten(1, (3, 4)), nn.Conv3d(3, 6, 3, padding=1), nn.BatchNorm3d(6), nn.Hardswish(),
        nn.AvgPool3d((2, 1, 1), (2, 1, 1)), nn.Flatten(1, 2),
    ),
}  # fmt: skip


def steps() -> list[dict[str, Any]]:
    """Return the traced steps of the above, of modules that others wrote, and of networks."""
    named = itertools.chain(_small_steps(), _foreign_steps(), _network_steps())
    return [{"step": name} | _numbers(traced) for name, traced in named]


def _small_steps() -> Iterator[tuple[str, Trace]]:
    for name, of_images in OF_IMAGES.items():
        yield name, _traced(lambda _, x, f=of_images: f(x))
    for name, layer in OF_LAYERS.items():
        yield name, _traced(lambda self, x: self.layer(x), layer=layer)
    for name, (of_tokens, layers) in OF_TOKENS.items():
        yield name, _traced(lambda self, x, f=of_tokens: f(self, x.flatten(2).mT).mT, **layers)


def _foreign_steps() -> Iterator[tuple[str, Trace]]:
    for foreign in MODULES:
        if foreign.by_values or "Hugging Face" in foreign.name:
            continue
        args, kwargs = foreign.call()
        loss = foreign.loss
        tracer = Tracer(
            on_meta(foreign.build(), None),
            ExampleInputs.of(*args, **kwargs),
            batch_sizes=(8, 32),
            loss=default_loss if loss is None else lambda output, _, loss=loss: loss(output),
        )
        yield foreign.name, tracer.trace()


def _network_steps() -> Iterator[tuple[str, Trace]]:
    settings = (
        (Phase.TRAIN, TraceSettings(Precision.AMP_FP16, MemoryFormat.CHANNELS_LAST)),
        (Phase.TRAIN, TraceSettings(execution=Execution.COMPILE)),
        (Phase.INFER, TraceSettings(Precision.BF16)),
    )
    for build in (Convolutions, OtherOperators):
        for phase, setting in settings:
            yield f"{build.__name__}, {phase}, {setting}", trace(build(), 32, setting, phase)


def _traced(body: Callable[..., Tensor], **layers: Any) -> Trace:
    """Trace a classifier of images with these operators in the middle."""
    classifier = Function(
        lambda self, x: self.head(body(self, self.stem(x)).flatten(2).mean(2)),
        stem=nn.Conv2d(3, WIDTH, 3, padding=1), head=nn.LazyLinear(5), **layers,
    )  # fmt: skip
    classifier(torch.rand(2, 3, SIZE, SIZE))  # of the width that the head gets
    return trace(classifier, SIZE)


def _numbers(traced: Trace) -> dict[str, Any]:
    """Return graph, kernels and allocations of a step at batch size 8, or why it has none."""
    numbers: dict[str, Any] = {"refusal": traced.refusal, "remark": traced.remark}
    if traced.graph is not None:
        graph = traced.graph.at(8)
        numbers["operators"] = [*graph.operators]
        numbers["edges"] = graph.edges.ravel().tolist()
        for name in ("macs", "parameters", "memory_bytes"):
            numbers[name] = getattr(graph, name).tolist()
        for name in ("input_shapes", "output_shapes"):
            numbers[name] = (
                getattr(graph, name).prod(axis=1, where=getattr(graph, name) > 0).tolist()
            )
    if traced.kernels is not None and traced.allocations is not None:
        table, memory = traced.kernels.table, traced.allocations
        names = (
            "kinds", "passes", "counts", "half", "channels_last", "windows", "strides", "pixels",
        )  # fmt: skip
        numbers["kernels"] = [
            [*(int(getattr(table, n)[row]) for n in names), *table.sizes[row].ravel().tolist()]
            for row in range(len(table))
        ]
        sizes = memory.sizes_at(8)
        in_order = np.arange(1, len(sizes) + 1)
        numbers["events"] = np.bincount(memory.kinds).tolist()
        numbers["bytes"] = [int(sizes.sum()), int(sizes @ in_order), int(memory.blocks @ in_order)]
        saved = traced.saved_bytes
        numbers["saved_bytes"] = None if saved is None else int(saved.at(8))
    return numbers
