"""FlexAttention is traced as its fused kernel, however it is called."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from small_modules import Parts
from torch import nn
from torch.nn.attention import flex_attention as flex

from trappm.profiler.models.model_input import ExampleInputs
from trappm.profiler.records import Phase, Precision
from trappm.profiler.trace import trace
from trappm.profiler.traced_step import KernelKind, Size, TraceSettings

LENGTH, WIDTH, HEADS = 256, 64, 4
TOKENS = torch.rand(8, LENGTH, WIDTH)


def causal(batch, head, query, key):
    return query >= key


def relative(score, batch, head, query, key):
    return score + (query - key)


def mask(device, mask_mod=causal, batch=None, length=LENGTH):
    return flex.create_block_mask(mask_mod, batch, None, length, length, device=device)


class Attention(Parts):
    """Attention of `self.attend(self, queries, keys, values)` between two linear layers."""

    def __init__(self, attend, key_heads=HEADS, **parts):
        width = WIDTH // HEADS * (HEADS + 2 * key_heads)
        super().__init__(qkv=nn.Linear(WIDTH, width), head=nn.Linear(WIDTH, 10), **parts)
        self.attend = attend
        self.key_heads = key_heads

    def forward(self, tokens):
        batch, length, _ = tokens.shape
        heads = self.qkv(tokens).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
        attended = self.attend(self, *heads.split([HEADS, self.key_heads, self.key_heads], 1))
        return self.head(attended.transpose(1, 2).reshape(batch, length, WIDTH).mean(1))


def traced(attend, precision=Precision.FP32, phase=Phase.TRAIN, **parts):
    inputs = ExampleInputs.of(TOKENS)
    return trace(Attention(attend, **parts), inputs, TraceSettings(precision), phase)


def attention_kernels(step):
    """Keys per query of each fused kernel."""
    table = step.kernels.table
    return [
        sizes[Size.COLUMNS, 0]
        for kind, sizes in zip(table.kinds, table.sizes, strict=True)
        if kind == KernelKind.ATTENTION
    ]


def fused(self, q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


WAYS = {
    "plain": lambda self, q, k, v: flex.flex_attention(q, k, v),
    "by keyword": lambda self, q, k, v: flex.flex_attention(query=q, key=k, value=v, scale=0.1),
    "compiled": lambda self, q, k, v: torch.compile(flex.flex_attention)(q, k, v),
    "score_mod": lambda self, q, k, v: flex.flex_attention(q, k, v, score_mod=relative),
    "sum of a row": lambda self, q, k, v: flex.flex_attention(q, k, v, return_lse=True)[0],
    "no block left out": lambda self, q, k, v: flex.flex_attention(
        q, k, v, block_mask=mask("cpu", lambda b, h, i, j: i < LENGTH)
    ),
}


@cache
def plainly_traced(precision):
    return traced(fused, precision)


@pytest.mark.parametrize(
    ("way", "precision"),
    [*((way, Precision.FP32) for way in WAYS), ("plain", Precision.AMP_BF16)],
)
def test_the_step_keeps_what_fused_attention_keeps(way, precision):
    attend, plain = WAYS[way], plainly_traced(precision)
    train, infer = (traced(attend, precision, phase) for phase in (Phase.TRAIN, Phase.INFER))
    assert train.saved_bytes == plain.saved_bytes
    scores_bytes = train.allocations.batch_sizes[0] * HEADS * LENGTH**2 * 2
    for step in train, infer:
        assert step.allocations.sizes[:, 0].max() < scores_bytes
        assert step.graph.operators == plain.graph.operators
    assert attention_kernels(train) == [LENGTH, LENGTH]
    assert attention_kernels(infer) == [LENGTH]


@pytest.mark.parametrize("device", ["cuda", None], ids=["in forward", "before"])
def test_a_block_mask_leaves_out_blocks(device):
    before = mask("cpu")

    def attend(self, q, k, v):
        return flex.flex_attention(q, k, v, block_mask=mask(device) if device else before)

    assert attention_kernels(traced(attend)) == [3 * LENGTH // 4] * 2


def test_pytorch_is_as_before_after_a_trace():
    code, seen = flex.flex_attention.__code__, []

    def attend(self, q, k, v):
        seen.append(flex.flex_attention.__code__)
        return flex.flex_attention(q, k, v)

    traced(attend)
    assert flex.flex_attention.__code__ is code
    assert seen[0] is not code
    with pytest.raises(ValueError, match="only supported on"):
        flex.flex_attention(*(torch.empty(1, 1, 128, 16, device="meta") for _ in range(3)))
