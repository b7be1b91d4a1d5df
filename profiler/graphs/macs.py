"""Multiply-accumulate operations (MACs) of an ONNX node's forward pass, from shapes alone.

Linear algebra is counted exactly as FlopCounterMode counts it (half its flops; the addition of a
bias is free). Everything else counts one MAC for each pass over an element that it computes, so
that a model of many cheap operators does not look free; moving data counts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Shape = tuple[int, ...]
Attributes = Mapping[str, Any]
_Rule = Callable[[Attributes, Sequence[Shape], Sequence[Shape]], int]

MOVES = frozenset(
    {"BitCast", "Cast", "CastLike", "CenterCropPad", "Compress", "Concat", "ConstantOfShape",
     "DepthToSpace", "Dropout", "Expand", "Flatten", "Gather", "GatherElements", "GatherND",
     "Identity", "Pad", "Reshape", "ReverseSequence", "ScatterElements", "ScatterND", "Slice",
     "SpaceToDepth", "Split", "Squeeze", "TensorScatter", "Tile", "Transpose", "Trilu",
     "Unsqueeze"}
)  # fmt: skip
"""Operators that move data and compute nothing (Dropout: as inference runs it)."""
VIEWS = frozenset(
    {"Constant", "Dropout", "Expand", "Flatten", "Identity", "Reshape", "Shape", "Slice", "Split",
     "Squeeze", "Transpose", "Unsqueeze"}
)  # fmt: skip
"""Operators for which PyTorch runs no kernel."""
CONVOLUTIONS = frozenset({"CausalConvWithState", "Conv", "ConvTranspose", "DeformConv"})
PRODUCTS = frozenset(
    {"Attention", "Einsum", "GRU", "Gemm", "LSTM", "LinearAttention", "MatMul", "RNN"}
)
"""Operators made of matrix products, beside convolutions."""

_PASSES = {
    # mean, variance, normalise, scale and shift
    "GroupNormalization": 4,
    "InstanceNormalization": 4,
    "LayerNormalization": 4,
    "LpNormalization": 2,
    "RMSNormalization": 3,
    # times cosine, times sine, sum
    "RotaryEmbedding": 3,
    # maximum, exponential, sum, divide
    "LogSoftmax": 4,
    "Softmax": 4,
}


def node_macs(
    operator: str, attributes: Attributes, inputs: Sequence[Shape], outputs: Sequence[Shape]
) -> int:
    """MACs of one node.

    Args:
        operator: ONNX operator type.
        attributes: the node's attributes as Python values.
        inputs: shapes of all inputs, weights included; () for one left out.
        outputs: shapes of all outputs.
    """
    if operator in MOVES or not outputs:
        return 0
    rule = _RULES.get(operator)
    if rule is not None:
        return rule(attributes, inputs, outputs)
    if operator.startswith(("Arg", "Global", "Reduce")):
        return math.prod(inputs[0])
    return math.prod(outputs[0]) * _PASSES.get(operator, 1)


def _conv(_: Attributes, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    return math.prod(outputs[0]) * math.prod(inputs[1][1:])


def _conv_transpose(_: Attributes, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    return math.prod(inputs[0]) * math.prod(inputs[1][1:])


def _gemm(attributes: Attributes, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    inner: int = inputs[0][0] if attributes.get("transA", 0) else inputs[0][1]
    return math.prod(outputs[0]) * inner


def _matmul(_: Attributes, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    return math.prod(outputs[0]) * inputs[0][-1]


def _einsum(attributes: Attributes, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """The product over all labels, as if it were one loop nest (exact for two operands)."""
    terms = attributes["equation"].replace(" ", "").split("->")[0].split(",")
    extents: dict[str, int] = {}
    batch = 1
    for term, shape in zip(terms, inputs, strict=True):
        head, dots, tail = term.partition("...")
        spread = len(shape) - len(head) - len(tail) if dots else 0
        labelled = shape[: len(head)] + shape[len(head) + spread :]
        extents |= {
            c: max(n, extents.get(c, 1)) for c, n in zip(head + tail, labelled, strict=True)
        }
        batch = max(batch, math.prod(shape[len(head) : len(head) + spread]))
    return batch * math.prod(extents.values())


def _attention(attributes: Attributes, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Scores and weighted values: each query meets each key, over all heads."""
    query, key, value = inputs[:3]
    if len(query) == 3:  # (batch, length, heads * size)
        batch, length, width = query
        heads: int = attributes.get("q_num_heads", 1)
        value_heads: int = attributes.get("kv_num_heads", heads)
        value_width = value[-1] // value_heads * heads
    else:  # (batch, heads, length, size)
        batch, heads, length, size = query
        width, value_width = heads * size, heads * value[-1]
    return batch * length * key[-2] * (width + value_width)


def _linear_attention(
    attributes: Attributes, inputs: Sequence[Shape], outputs: Sequence[Shape]
) -> int:
    """At each place a state of key by value is updated by each key head, read by each query head.

    The delta rules also read it to find out what to add.
    """
    (batch, length, width), _, value = inputs[:3]
    heads: int = attributes["q_num_heads"]
    key_heads: int = attributes["kv_num_heads"]
    updates = 2 if "delta" in attributes.get("update_rule", "gated_delta") else 1
    state = width // heads * (value[-1] // key_heads)
    return batch * length * state * (heads + updates * key_heads)


def _recurrent(_: Attributes, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """At each time step of each sample, the weights for the input and for the state."""
    return inputs[0][0] * inputs[0][1] * (math.prod(inputs[1]) + math.prod(inputs[2]))


def _pool(attributes: Attributes, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    return math.prod(outputs[0]) * math.prod(attributes["kernel_shape"])


_RULES: Mapping[str, _Rule] = {
    "Attention": _attention,
    "AveragePool": _pool,
    "CausalConvWithState": _conv,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "DeformConv": _conv,
    "Einsum": _einsum,
    "GRU": _recurrent,
    "Gemm": _gemm,
    "LSTM": _recurrent,
    "LinearAttention": _linear_attention,
    "LpPool": _pool,
    "MatMul": _matmul,
    "MaxPool": _pool,
    "RNN": _recurrent,
}
