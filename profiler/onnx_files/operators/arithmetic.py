"""What each ONNX operator does, in PyTorch: for modules that are rebuilt from files.

Tensors lie on the meta device; what is known by value (shapes, axes, scales) is a NumPy array.
Of several ways to compute the same, the one is taken whose memory in training is that of the
models that are exported: `Linear` for a product with weights, fused norms, views where views do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from torch import Tensor

from trappm.profiler.errors import UnsupportedModelError
from trappm.profiler.onnx_files.operators.call import Call, Function
from trappm.profiler.onnx_files.operators.data_movement import MOVES
from trappm.profiler.onnx_files.operators.patterns import IN_PLACE


def _unary(function: Callable[[Tensor], Tensor]) -> Function:
    return lambda call: function(call.tensor())


def _binary(function: Callable[[Any, Any], Tensor]) -> Function:
    def run(call: Call) -> Tensor:
        first, second = call.operand(0), call.operand(1)
        if not isinstance(first, Tensor) and not isinstance(second, Tensor):
            first = call.tensor(0)
        return function(first, second)

    return run


def _division(call: Call) -> Tensor:
    return torch.div(call.tensor(0), call.operand(1))


def _activation(function: Callable[..., Tensor]) -> Function:
    return lambda call: function(call.tensor(), inplace=bool(call.attributes.get(IN_PLACE)))


def _chain(function: Callable[[Tensor, Tensor], Tensor]) -> Function:
    """An operator of any number of inputs, pair by pair."""

    def run(call: Call) -> Tensor:
        result = call.tensor(0)
        for place in range(1, len(call.inputs)):
            result = function(result, call.tensor(place))
        return result

    return run


def _reduction(function: Callable[[Tensor, list[int], bool], Tensor]) -> Function:
    def run(call: Call) -> Tensor:
        x = call.tensor()
        axes = call.ints("axes", 1)
        if not axes:
            if call.attributes.get("noop_with_empty_axes"):
                return x
            axes = list(range(x.dim()))
        return function(x, axes, bool(call.attributes.get("keepdims", 1)))

    return run


def _index_reduction(function: Callable[..., Tensor]) -> Function:
    return lambda call: function(
        call.tensor(), call.axis(0), bool(call.attributes.get("keepdims", 1))
    )


def _window(call: Call, x: Tensor, kernel: Sequence[int]) -> tuple[Tensor, list[int], Any, Any]:
    """The input, padded where its padding is lopsided; then padding, strides, dilations."""
    rank = len(kernel)
    strides = call.ints("strides") or [1] * rank
    dilations = call.ints("dilations") or [1] * rank
    pads = call.ints("pads") or [0] * (2 * rank)
    mode = call.attributes.get("auto_pad", "NOTSET")
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        pads = [0] * (2 * rank)
        for i, size in enumerate(x.shape[2:]):
            reach = dilations[i] * (kernel[i] - 1) + 1
            total = max((math.ceil(size / strides[i]) - 1) * strides[i] + reach - size, 0)
            small = total // 2
            first = small if mode == "SAME_UPPER" else total - small
            pads[i], pads[i + rank] = first, total - first
    if pads[:rank] != pads[rank:]:
        flat = [p for i in reversed(range(rank)) for p in (pads[i], pads[i + rank])]
        return F.pad(x, flat), [0] * rank, strides, dilations
    return x, pads[:rank], strides, dilations


def _convolution(call: Call) -> Tensor:
    weight = call.tensor(1)
    x, pads, strides, dilations = _window(call, call.tensor(), weight.shape[2:])
    groups = int(call.attributes.get("group", 1))
    function = (F.conv1d, F.conv2d, F.conv3d)[weight.dim() - 3]
    return function(x, weight, call.optional(2), strides, pads, dilations, groups)


def _transposed_convolution(call: Call) -> Tensor:
    weight = call.tensor(1)
    rank = weight.dim() - 2
    if "output_shape" in call.attributes or call.attributes.get("auto_pad", "NOTSET") != "NOTSET":
        raise UnsupportedModelError("a ConvTranspose whose padding hangs on its output's shape")
    pads = call.ints("pads") or [0] * (2 * rank)
    more = call.ints("output_padding") or [0] * rank
    # What ONNX cuts off at the end beyond the beginning is less output padding.
    extra = [more[i] + pads[i] - pads[i + rank] for i in range(rank)]
    function: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]
    result: Tensor = function(
        call.tensor(), weight, call.optional(2), call.ints("strides") or [1] * rank,
        pads[:rank], extra, int(call.attributes.get("group", 1)),
        call.ints("dilations") or [1] * rank,
    )  # fmt: skip
    return result


def _max_pool(call: Call) -> Tensor:
    kernel = call.ints("kernel_shape") or []
    x, pads, strides, dilations = _window(call, call.tensor(), kernel)
    function = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(kernel) - 1]
    ceil = bool(call.attributes.get("ceil_mode", 0))
    result: Tensor = function(x, kernel, strides, pads, dilations, ceil)
    return result


def _average_pool(call: Call) -> Tensor:
    kernel = call.ints("kernel_shape") or []
    x, pads, strides, dilations = _window(call, call.tensor(), kernel)
    if set(dilations) != {1}:
        raise UnsupportedModelError("an AveragePool with dilations")
    function: Any = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(kernel) - 1]
    ceil = bool(call.attributes.get("ceil_mode", 0))
    with_pads = bool(call.attributes.get("count_include_pad", 0))
    result: Tensor = function(x, kernel, strides, pads, ceil, with_pads)
    return result


def _global_pool(call: Call) -> Tensor:
    x, largest = call.tensor(), call.operator == "GlobalMaxPool"
    if x.dim() == 4:
        return F.adaptive_max_pool2d(x, 1) if largest else F.adaptive_avg_pool2d(x, 1)
    axes = list(range(2, x.dim()))
    return x.amax(axes, keepdim=True) if largest else x.mean(axes, keepdim=True)


def _batch_norm(call: Call) -> Tensor:
    x, weight, bias, mean, variance = (call.tensor(i) for i in range(5))
    # Standardised weights are written as a norm whose statistics are made of the weights.
    made = call.training and (mean.requires_grad or variance.requires_grad)
    running = (None, None) if made else (mean, variance)
    return F.batch_norm(x, running[0], running[1], weight, bias, call.training, eps=_epsilon(call))


def _epsilon(call: Call) -> float:
    return call.number("epsilon", 1e-5)


def _layer_norm(call: Call) -> Tensor:
    x = call.tensor()
    shape = x.shape[call.axis(-1) % x.dim() :]
    weight, bias = (None if t is None else t.reshape(shape) for t in map(call.optional, (1, 2)))
    return F.layer_norm(x, shape, weight, bias, _epsilon(call))


def _rms_norm(call: Call) -> Tensor:
    x = call.tensor()
    shape = x.shape[call.axis(-1) % x.dim() :]
    weight = call.optional(1)
    return F.rms_norm(x, shape, None if weight is None else weight.reshape(shape), _epsilon(call))


def _group_norm(call: Call) -> Tensor:
    x, weight, bias = (call.tensor(i) for i in range(3))
    groups = int(call.attributes["num_groups"])
    if weight.numel() != x.shape[1]:  # opset 18: one weight a group
        size = x.shape[1] // groups
        weight, bias = (t.repeat_interleave(size, output_size=x.shape[1]) for t in (weight, bias))
    return F.group_norm(x, groups, weight.reshape(-1), bias.reshape(-1), _epsilon(call))


def _instance_norm(call: Call) -> Tensor:
    x, weight, bias = (call.tensor(i) for i in range(3))
    return F.instance_norm(x, weight=weight, bias=bias, eps=_epsilon(call))


def _addition(call: Call) -> Tensor:
    first, second = call.operand(0), call.operand(1)
    if call.attributes.get(IN_PLACE):
        return call.tensor(0).add_(second)
    return torch.add(first if isinstance(second, Tensor) else call.tensor(0), second)


def _linear(call: Call) -> Tensor:
    """A product with weights, and a bias if the file adds one."""
    x, weight, bias = call.tensor(0), call.tensor(1), call.optional(2)
    if weight.dim() == 2 and (bias is None or bias.dim() == 1):
        return F.linear(x, weight.t(), bias)
    product = x @ weight
    return product if bias is None else product + bias


def _gemm(call: Call) -> Tensor:
    x, weight, bias = call.tensor(0), call.tensor(1), call.optional(2)
    if call.attributes.get("transA"):
        x = x.t()
    if call.attributes.get("transB"):
        weight = weight.t()
    alpha, beta = call.number("alpha", 1), call.number("beta", 1)
    if bias is None:
        product = F.linear(x, weight.t())
        return product if alpha == 1 else product * alpha
    if alpha == beta == 1 and bias.dim() == 1:
        return F.linear(x, weight.t(), bias)
    return torch.addmm(bias, x, weight, alpha=alpha, beta=beta)


def _attention(call: Call) -> Tensor:
    """The operator of opset 23, for queries, keys and values of four axes."""
    query, key, value = (call.tensor(i) for i in range(3))
    if query.dim() != 4 or call.outputs > 1 or call.has(4):
        raise UnsupportedModelError("an Attention with a cache, or of three axes")
    causal = bool(call.attributes.get("is_causal", 0))
    return F.scaled_dot_product_attention(query, key, value, call.optional(3), is_causal=causal)


def _scaled_attention(call: Call) -> Tensor:
    """Attention as exporters take it apart: queries, transposed keys, values, and a mask."""
    query, keys, value = (call.tensor(i) for i in range(3))
    return F.scaled_dot_product_attention(
        query, keys.transpose(-2, -1), value, None if not call.has(3) else call.tensor(3)
    )


def _clip(call: Call) -> Tensor:
    x = call.tensor()
    low = call.attributes.get("min", call.operand(1) if call.has(1) else None)
    high = call.attributes.get("max", call.operand(2) if call.has(2) else None)
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return torch.clamp(x, low, high)
    if low is None or high is None:
        return torch.clamp(x, low, high)
    return F.hardtanh(x, low, high, bool(call.attributes.get(IN_PLACE)))


def _softmax(call: Call) -> Tensor:
    x = call.tensor()
    function = torch.log_softmax if call.operator == "LogSoftmax" else torch.softmax
    axis = call.axis(-1 if call.opset >= 13 else 1) % x.dim()
    if call.opset < 13 and axis != x.dim() - 1:  # was defined over all axes from this one on
        return function(x.flatten(axis), -1).reshape(x.shape)
    return function(x, axis)


def _l2_normalised(call: Call) -> Tensor:
    order = int(call.attributes.get("p", 2))
    return F.normalize(call.tensor(), p=order, dim=call.axis(-1))


def _dropout(call: Call) -> Any:
    ratio = call.known(1) if call.opset >= 12 else None
    share = call.number("ratio", 0.5) if ratio is None else float(ratio.item())
    x = F.dropout(call.tensor(), share, call.training and share > 0)
    return [x, x] if call.outputs > 1 else x


FUNCTIONS: Mapping[str, Function] = {
    # linear algebra
    "Conv": _convolution,
    "ConvTranspose": _transposed_convolution,
    "Gemm": _gemm,
    "MatMul": _binary(torch.matmul),
    "Einsum": lambda call: torch.einsum(
        str(call.attributes["equation"]), *(call.tensor(i) for i in range(len(call.inputs)))
    ),
    "Attention": _attention,
    # norms and pools
    "BatchNormalization": _batch_norm,
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm,
    "GroupNormalization": _group_norm,
    "InstanceNormalization": _instance_norm,
    "LpNormalization": _l2_normalised,
    "LRN": lambda call: F.local_response_norm(call.tensor(), int(call.attributes["size"])),
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "GlobalAveragePool": _global_pool,
    "GlobalMaxPool": _global_pool,
    # activations
    "Relu": _activation(F.relu),
    "Gelu": lambda call: F.gelu(
        call.tensor(), approximate=str(call.attributes.get("approximate", "none"))
    ),
    "Sigmoid": _unary(torch.sigmoid),
    "Tanh": _unary(torch.tanh),
    "HardSwish": _activation(F.hardswish),
    "HardSigmoid": _unary(F.hardsigmoid),
    "Mish": _unary(F.mish),
    "Softplus": _unary(F.softplus),
    "Softsign": _unary(F.softsign),
    "Elu": lambda call: F.elu(call.tensor(), call.number("alpha", 1)),
    "Celu": lambda call: F.celu(call.tensor(), call.number("alpha", 1)),
    "Selu": _unary(F.selu),
    "LeakyRelu": lambda call: F.leaky_relu(
        call.tensor(), call.number("alpha", 0.01), bool(call.attributes.get(IN_PLACE))
    ),
    "PRelu": lambda call: F.prelu(call.tensor(), call.tensor(1).reshape(-1)),
    "ThresholdedRelu": lambda call: F.threshold(call.tensor(), call.number("alpha", 1), 0),
    "Softmax": _softmax,
    "LogSoftmax": _softmax,
    "Clip": _clip,
    "Dropout": _dropout,
    # arithmetic
    "Add": _addition,
    "Sub": _binary(lambda a, b: a - b),
    "Mul": _binary(lambda a, b: a * b),
    "Div": _division,
    "Pow": _binary(lambda a, b: a**b),
    "Mod": _binary(lambda a, b: a % b),
    "Max": _chain(torch.maximum),
    "Min": _chain(torch.minimum),
    "Sum": _chain(torch.add),
    "Equal": _binary(lambda a, b: a == b),
    "Less": _binary(lambda a, b: a < b),
    "LessOrEqual": _binary(lambda a, b: a <= b),
    "Greater": _binary(lambda a, b: a > b),
    "GreaterOrEqual": _binary(lambda a, b: a >= b),
    "And": _chain(torch.logical_and),
    "Or": _chain(torch.logical_or),
    "Not": _unary(torch.logical_not),
    "IsNaN": _unary(torch.isnan),
    "Where": lambda call: torch.where(call.tensor(0), call.operand(1), call.operand(2)),
    "Abs": _unary(torch.abs),
    "Neg": _unary(torch.neg),
    "Sign": _unary(torch.sign),
    "Sqrt": _unary(torch.sqrt),
    "Reciprocal": _unary(torch.reciprocal),
    "Exp": _unary(torch.exp),
    "Log": _unary(torch.log),
    "Erf": _unary(torch.erf),
    "Sin": _unary(torch.sin),
    "Cos": _unary(torch.cos),
    "Floor": _unary(torch.floor),
    "Ceil": _unary(torch.ceil),
    "Round": _unary(torch.round),
    # reductions
    "ReduceMean": _reduction(lambda x, axes, keep: x.mean(axes, keepdim=keep)),
    "ReduceSum": _reduction(lambda x, axes, keep: x.sum(axes, keepdim=keep)),
    "ReduceMax": _reduction(lambda x, axes, keep: x.amax(axes, keepdim=keep)),
    "ReduceMin": _reduction(lambda x, axes, keep: x.amin(axes, keepdim=keep)),
    "ReduceL1": _reduction(lambda x, axes, keep: x.norm(p=1, dim=axes, keepdim=keep)),
    "ReduceL2": _reduction(lambda x, axes, keep: x.norm(p=2, dim=axes, keepdim=keep)),
    "ReduceSumSquare": _reduction(lambda x, axes, keep: (x * x).sum(axes, keepdim=keep)),
    "ReduceLogSumExp": _reduction(lambda x, axes, keep: x.logsumexp(axes, keepdim=keep)),
    "ArgMax": _index_reduction(torch.argmax),
    "ArgMin": _index_reduction(torch.argmin),
    "CumSum": lambda call: call.tensor().cumsum((call.ints("axis", 1) or [0])[0]),
    **MOVES,
    # what `patterns` puts together again
    "trappm.Linear": _linear,
    "trappm.Variance": _reduction(lambda x, axes, keep: x.var(axes, keepdim=keep)),
    "trappm.Rsqrt": _unary(torch.rsqrt),
    "trappm.ScaledAttention": _scaled_attention,
    "trappm.Silu": _activation(F.silu),
}
"""PyTorch's form of each operator that modules can be rebuilt from."""
