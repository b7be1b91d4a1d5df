"""The decoders of llm-foundry, litgpt and Megatron as modules that can be traced on meta tensors.

Written after what these projects run: order of norms, what is fused, types, how the loss is
computed. A rank of tensor parallelism has fewer heads and a narrower feed-forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a decoder is made of."""

    hidden: int
    layers: int
    heads: int
    vocabulary: int
    feed_forward: int
    groups: int | None = None
    """Heads of keys and values; None for as many as of queries."""
    head_width: int | None = None
    """By default, hidden / heads."""
    gated: bool = False
    """Feed-forward of two factors, as Llama has it."""
    root_mean_square: bool = False
    """RMS norms in place of layer norms."""
    biases: bool = False
    """Of linear layers."""
    parallel: bool = False
    """Attention and feed-forward side by side, as in GPT-NeoX."""
    shared_norm: bool = False
    """One norm for both of them."""
    post_norms: bool = False
    """Norms behind attention and feed-forward as well, as in Gemma 2."""
    tied: bool = False
    """The embeddings are the head's weights."""
    head_bias: bool = False
    positions: int = 0
    """Learned ones; 0 for rotary positions."""
    rotary_share: float = 1.0
    """Of a head's width."""
    normal_bias: bool = True
    """Whether layer norms have one."""

    @property
    def width(self) -> int:
        """Of a head."""
        return self.head_width or self.hidden // self.heads

    @property
    def key_heads(self) -> int:
        return self.groups or self.heads


@dataclass(frozen=True, kw_only=True)
class Method:
    """What is trained of a decoder, and how."""

    rank: int = 0
    """Of LoRA's factors."""
    everywhere: bool = False
    """LoRA on keys and all other linear layers too, not on queries and values only."""
    adapter: int = 0
    """1 for adapters' prompts; 2 for a scale and bias of every linear layer as well."""
    inference: bool = False
    checkpointing: bool = False
    chunk: int = 0
    """Tokens of a chunk of logits; 0 for all at once."""
    wide_scores: bool = False
    """Logits leave the model in 32 bits and the loop holds them until there are the next ones, as
    Lightning Fabric's `bf16-true` and litgpt's loop have it."""
    weight_bytes: float = 0.0
    """Of a quantised weight, scales included; 0 for weights that are not quantised."""

    @property
    def is_full(self) -> bool:
        return not (self.rank or self.adapter)


PROMPT = 10
"""Tokens of an adapter's prompt."""
FIRST_ADAPTED = 2
"""Layers without a prompt (litgpt's `adapter_start_layer`)."""


class RootMeanSquare(nn.Module):
    """In 32 bits, as litgpt writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        kind = x.dtype
        x = x.float()
        x = x * torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-5)
        return x.to(kind) * self.weight


class _Dequantised(torch.autograd.Function):
    """A product with a quantised weight, which is unpacked for it and once more backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inputs: int, outputs: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.size = outputs, inputs
        weight = x.new_empty(outputs, inputs)
        return x @ weight.clone().T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight = gradient.new_empty(ctx.size)
        return gradient @ weight.clone(), None, None


class Linear(nn.Linear):
    """With what fine-tuning adds: factors of a low rank for some of the results, or a scale."""

    def __init__(self, inputs: int, outputs: int, bias: bool, method: Method) -> None:
        super().__init__(inputs, outputs, bias)
        self.quantised = method.weight_bytes > 0
        if self.quantised:
            size = int(inputs * outputs * method.weight_bytes)
            self.register_buffer("packed", torch.zeros(size, dtype=torch.uint8))
            self.weight = nn.Parameter(torch.zeros(0))
        self.scaled, self.factors = method.adapter == 2, method.everywhere
        if self.factors:
            self.lora_a = nn.Parameter(torch.zeros(method.rank, inputs))
            self.lora_b = nn.Parameter(torch.zeros(outputs, method.rank))
        if self.scaled:
            self.adapter_bias = nn.Parameter(torch.zeros(outputs))
            self.adapter_scale = nn.Parameter(torch.ones(outputs))

    def forward(self, x: Tensor) -> Tensor:
        if self.scaled:
            return self.adapter_scale * (self._product(x) + self.adapter_bias)
        result = self._product(x)
        if not self.factors:
            return result
        return result + (F.dropout(x, 0.05) @ self.lora_a.T @ self.lora_b.T) * 2.0

    def _product(self, x: Tensor) -> Tensor:
        if not self.quantised:
            return super().forward(x)
        result = _Dequantised.apply(x, self.in_features, self.out_features)
        return result if self.bias is None else result + self.bias


class Projection(Linear):
    """Queries, keys and values in one product; LoRA moves queries and values."""

    def __init__(self, shape: Shape, method: Method, bias: bool) -> None:
        sizes = [shape.heads * shape.width] + [shape.key_heads * shape.width] * 2
        super().__init__(shape.hidden, sum(sizes), bias, method)
        self.moved, self.rank = [sizes[0], sizes[2]], method.rank
        if method.everywhere:  # three groups are as one of three times the rank
            self.rank = 0
        if self.rank:
            self.lora_a = nn.Parameter(torch.zeros(2 * method.rank, shape.hidden))
            self.lora_b = nn.Parameter(torch.zeros(sum(self.moved), method.rank))
            self.register_buffer("places", torch.zeros(sum(self.moved), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        if not self.rank:
            return result
        halves = F.linear(F.dropout(x, 0.05), self.lora_a).transpose(-2, -1)
        if self.moved[0] == self.moved[1]:
            after = F.conv1d(halves, self.lora_b.unsqueeze(-1), groups=2)
        else:
            parts = zip(halves.chunk(2, 1), self.lora_b.split(self.moved), strict=True)
            after = torch.cat([F.conv1d(a, b.unsqueeze(-1)) for a, b in parts], dim=1)
        padded = x.new_zeros(*x.shape[:-1], self.out_features)
        moved = after.transpose(-2, -1) * 2.0
        return result + padded.index_copy(-1, self.places, moved)


class Attention(nn.Module):
    """Queries, keys and values in one product or three, and attention over them."""

    def __init__(self, shape: Shape, method: Method, layer: int) -> None:
        super().__init__()
        self.shape = shape
        self.qkv = Projection(shape, method, shape.biases)
        self.out = Linear(shape.heads * shape.width, shape.hidden, shape.biases, method)
        self.prompted = bool(method.adapter) and layer >= FIRST_ADAPTED
        if self.prompted:
            self.prompt = nn.Embedding(PROMPT, shape.hidden)
            self.gate = nn.Parameter(torch.zeros(1, 1, shape.heads, 1))

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        shape = self.shape
        batch, length, _ = x.shape
        q, k, v = self._heads(self.qkv(x), batch, length)
        if cos is not None and sin is not None:
            turned = int(shape.rotary_share * shape.width)
            q = torch.cat((_turned(q[..., :turned], cos, sin), q[..., turned:]), dim=-1)
            k = torch.cat((_turned(k[..., :turned], cos, sin), k[..., turned:]), dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        if self.prompted:
            prompts = self.prompt.weight.reshape(1, PROMPT, shape.hidden)
            _, key, value = self._heads(self.qkv(prompts), 1, PROMPT)
            key, value = (t.expand(batch, -1, -1, -1) for t in (key, value))
            mask = torch.ones(length, PROMPT, dtype=torch.bool, device=x.device)
            more = F.scaled_dot_product_attention(q, key, value, attn_mask=mask)
            y = y + self.gate * more.transpose(1, 2)
        return self.out(y.reshape(batch, length, shape.heads * shape.width))

    def _heads(self, qkv: Tensor, batch: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        shape = self.shape
        if shape.positions:  # three in a row, as llm-foundry and GPT-2 have them
            parts = qkv.chunk(3, dim=-1)
            q, k, v = (t.view(batch, length, -1, shape.width).transpose(1, 2) for t in parts)
            return q, k, v
        each = shape.heads // shape.key_heads
        split = qkv.view(batch, length, shape.key_heads, each + 2, shape.width)
        q, k, v = split.permute(0, 2, 3, 1, 4).split((each, 1, 1), dim=2)
        if shape.key_heads not in (1, shape.heads):
            k, v = (t.expand(batch, shape.key_heads, each, length, shape.width) for t in (k, v))
        elif shape.key_heads == 1:
            k, v = (t.expand(batch, 1, each, length, shape.width) for t in (k, v))
        q, k, v = (t.reshape(batch, -1, length, shape.width) for t in (q, k, v))
        return q, k, v


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos + rotated * sin).to(x.dtype)


class FeedForward(nn.Module):
    """Two products with an activation between, or three where it is gated."""

    def __init__(self, shape: Shape, method: Method) -> None:
        super().__init__()
        self.up = Linear(shape.hidden, shape.feed_forward, shape.biases, method)
        self.gate = None
        if shape.gated:
            self.gate = Linear(shape.hidden, shape.feed_forward, shape.biases, method)
        self.down = Linear(shape.feed_forward, shape.hidden, shape.biases, method)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x)))
        return self.down(F.silu(self.up(x)) * self.gate(x))


class Layer(nn.Module):
    """Attention and feed-forward with their norms and residuals."""

    def __init__(self, shape: Shape, method: Method, layer: int) -> None:
        super().__init__()
        self.shape = shape

        def norm() -> nn.Module:
            if shape.root_mean_square:
                return RootMeanSquare(shape.hidden)
            return nn.LayerNorm(shape.hidden, bias=shape.normal_bias)

        self.norm_1, self.norm_2 = norm(), None if shape.shared_norm else norm()
        self.after_attention = norm() if shape.post_norms else nn.Identity()
        self.after_feed_forward = norm() if shape.post_norms else nn.Identity()
        self.attention = Attention(shape, method, layer)
        self.feed_forward = FeedForward(shape, method)

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        normed = self.norm_1(x)
        attended = self.after_attention(self.attention(normed, cos, sin))
        if self.shape.parallel:
            second = normed if self.norm_2 is None else self.norm_2(x)
            return self.feed_forward(second) + attended + x
        x = attended + x
        assert self.norm_2 is not None
        return self.after_feed_forward(self.feed_forward(self.norm_2(x))) + x


class Decoder(nn.Module):
    """Tokens in, the loss of the next ones out, or in inference the logits."""

    def __init__(self, shape: Shape, method: Method, length: int) -> None:
        super().__init__()
        self.shape, self.method = shape, method
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.places = nn.Embedding(shape.positions, shape.hidden) if shape.positions else None
        self.layers = nn.ModuleList(Layer(shape, method, i) for i in range(shape.layers))
        self.norm = (
            RootMeanSquare(shape.hidden)
            if shape.root_mean_square
            else nn.LayerNorm(shape.hidden, bias=shape.normal_bias)
        )
        self.head = None
        if not shape.tied:
            self.head = Linear(shape.hidden, shape.vocabulary, shape.head_bias, method)
        if not shape.positions:
            turned = int(shape.rotary_share * shape.width)
            self.register_buffer("cos", torch.zeros(length, turned))
            self.register_buffer("sin", torch.zeros(length, turned))
        if not method.is_full:
            for name, parameter in self.named_parameters():
                if method.rank:
                    parameter.requires_grad = "lora_" in name
                else:
                    own = name.endswith((".gate", "prompt.weight"))
                    more = method.adapter == 2 and ("adapter_" in name or "norm" in name)
                    parameter.requires_grad = own or more

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        cos = sin = None
        if self.places is not None:
            x = x + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        else:
            length = tokens.shape[1]
            cos, sin = self.cos[:length], self.sin[:length]
        for layer in self.layers:
            if self.method.checkpointing and self.training:
                x = checkpoint(layer, x, cos, sin, use_reentrant=False)
            else:
                x = layer(x, cos, sin)
        x = self.norm(x)
        if self.training:
            return self._loss(x)
        return self._scores(x)

    def _scores(self, x: Tensor) -> Tensor:
        return F.linear(x, self.tokens.weight) if self.head is None else self.head(x)

    def _loss(self, x: Tensor) -> Tensor:
        chunk = self.method.chunk or x.shape[1]
        parts = [self._scores(part) for part in x.split(chunk, dim=1)]
        if self.method.wide_scores:
            parts = self.kept = [part.float() for part in parts]
        flat = [part.flatten(0, 1) for part in parts]
        return torch.cat([F.cross_entropy(p, _next(p), reduction="none") for p in flat]).mean()


def _next(scores: Tensor) -> Tensor:
    return torch.zeros(scores.shape[0], dtype=torch.long, device=scores.device)


def parameter_count(shape: Shape) -> int:
    """Of the whole decoder, as `sum(p.numel())` counts it."""
    with torch.device("meta"):
        return sum(p.numel() for p in Decoder(shape, Method(), 1).parameters())
