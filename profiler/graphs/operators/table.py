"""Which ONNX nodes each PyTorch operator stands for, as PyTorch exports it at opset 17.

Rules are needed for calls whose result depends on the images only: whatever is made of weights and
constants alone is folded. The rules are in `tensors`, `layers` and `rare_layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trappm.profiler.graphs.operators import layers, tensors
from trappm.profiler.graphs.operators import rare_layers as more
from trappm.profiler.graphs.operators.tensors import Rule, elementwise, first

__all__ = ["RULES", "Rule", "elementwise"]


def _named(make: Callable[[str], Rule], names: Mapping[str, str]) -> dict[str, Rule]:
    """The rule that `make` gives for an ONNX operator, by each of its names in ATen."""
    return {name: make(operator) for operator, text in names.items() for name in text.split()}


_ONE_INPUT = {
    "Reshape": "reshape reshape_as view view_as _unsafe_view unflatten",
    "Expand": "expand expand_as broadcast_to",
    "Tile": "repeat tile repeat_interleave",
    "Squeeze": "squeeze",
    "Unsqueeze": "unsqueeze",
    "Slice": "narrow slice",
    "CumSum": "cumsum",
    "TopK": "topk sort",
    "DepthToSpace": "pixel_shuffle",
    "SpaceToDepth": "pixel_unshuffle",
    "Col2Im": "col2im",
    "Resize": "upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d "
    "upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa",
}
_ELEMENTWISE = {
    "And": "logical_and",
    "Clip": "hardtanh relu6",
    "IsNaN": "isnan",
    "Mod": "remainder fmod",
    "Not": "logical_not",
    "Or": "logical_or",
    "MatMul": "matmul bmm mm mv",
    "GridSample": "grid_sampler grid_sampler_2d",
    "ScatterElements": "scatter",
    "HardSwish": "hardswish",
    "Max": "maximum",
    "Min": "minimum",
    "Mul": "mul multiply",
    "PRelu": "prelu _prelu_kernel",
    "Selu": "selu",
    "ThresholdedRelu": "threshold",
}
_REDUCTIONS = {
    "ReduceLogSumExp": "logsumexp",
    "ReduceMax": "amax",
    "ReduceMean": "mean",
    "ReduceMin": "amin",
    "ReduceProd": "prod",
    "ReduceSum": "sum",
}
_ALONG_AN_AXIS = {
    "ArgMax": "argmax",
    "ArgMin": "argmin",
    "LogSoftmax": "log_softmax _log_softmax",
    "Softmax": "softmax _softmax",
    "Split": "split split_with_sizes tensor_split",
}

RULES: Mapping[str, Rule] = {
    "_adaptive_avg_pool2d": layers.adaptive_pool,
    "_convolution": layers.conv,
    "adaptive_avg_pool2d": layers.adaptive_pool,
    "adaptive_max_pool2d": layers.adaptive_max_pool,
    "add": tensors.add,
    "addcmul": tensors.addcmul,
    "addmm": layers.addmm,
    "baddbmm": layers.baddbmm,
    "batch_norm": layers.batch_norm,
    "cat": tensors.concat,
    "chunk": tensors.chunk,
    "clamp": tensors.clamp,
    "clamp_max": tensors.clamp,
    "clamp_min": tensors.clamp,
    "concat": tensors.concat,
    "constant_pad_nd": tensors.fill("constant"),
    "copy_": tensors.scatter,
    "div": tensors.div,
    "dropout": tensors.dropout,
    "einsum": tensors.einsum,
    "elu": tensors.activation("Elu", alpha="alpha"),
    "embedding": tensors.pick("Gather"),
    "flatten": tensors.flatten,
    "gather": tensors.pick("GatherElements"),
    "gelu": layers.gelu,
    "group_norm": layers.group_norm,
    "hardsigmoid": tensors.activation("HardSigmoid", alpha=1 / 6),
    "im2col": layers.unfold,
    "index": tensors.index,
    "index_put_": tensors.scatter,
    "index_select": tensors.pick("Gather"),
    "instance_norm": layers.instance_norm,
    "layer_norm": layers.layer_norm,
    "leaky_relu": tensors.activation("LeakyRelu", alpha="negative_slope"),
    "lerp": tensors.lerp,
    "linalg_vector_norm": tensors.vector_norm,
    "linear": layers.linear,
    "lstm": layers.lstm,
    "masked_fill": tensors.masked_fill,
    "mish": layers.mish,
    "pad": tensors.fill("constant"),
    "eq": tensors.binary("Equal"),
    "ge": tensors.binary("GreaterOrEqual"),
    "gt": tensors.binary("Greater"),
    "le": tensors.binary("LessOrEqual"),
    "lt": tensors.binary("Less"),
    "pow": tensors.binary("Pow"),
    "reflection_pad2d": tensors.fill("reflect"),
    "replication_pad2d": tensors.fill("edge"),
    "rms_norm": layers.rms_norm,
    "roll": tensors.roll,
    "rsqrt": tensors.inverse_root,
    "rsub": tensors.reversed_sub,
    "scaled_dot_product_attention": layers.attention,
    "select": tensors.select,
    "silu": layers.silu,
    "square": tensors.square,
    "stack": tensors.stack,
    "std": tensors.deviation,
    "std_mean": tensors.deviation,
    "sub": tensors.sub,
    "unbind": tensors.unbind,
    "unfold": tensors.windows,
    "var": tensors.variance,
    "var_mean": tensors.variance,
    "where": tensors.where,
    "bilinear": more.bilinear,
    "trappm::onnx": more.as_in_the_file,
    "flip": first("Slice"),
    "max": tensors.extremum("Max"),
    "min": tensors.extremum("Min"),
    **{f"conv{n}d": layers.conv for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": layers.conv_transpose for n in (1, 2, 3)},
    **dict.fromkeys(("permute", "transpose", "t", "swapaxes", "movedim"), tensors.transpose),
    **dict.fromkeys(("to", "type_as", "_to_copy", "float", "half"), tensors.cast),
    **dict.fromkeys(("alias", "clone", "contiguous", "detach", "lift_fresh"), tensors.alias),
    **dict.fromkeys(("zero_", "fill_"), more.fill),
    **{f"new_{name}": tensors.constant for name in ("empty", "full", "ones", "zeros")},
    **{f"{name}_like": tensors.constant for name in ("empty", "full", "ones", "zeros")},
    **{f"max_pool{n}d": more.max_pool(n) for n in (1, 2, 3)},
    **{f"max_pool{n}d_with_indices": more.max_pool(n) for n in (1, 2, 3)},
    **{f"avg_pool{n}d": more.average_pool(n) for n in (1, 2, 3)},
    **dict.fromkeys(("embedding_bag", "_embedding_bag"), more.embedding_bag),
    **_named(first, _ONE_INPUT),
    **_named(elementwise, _ELEMENTWISE),
    **_named(tensors.reduction, _REDUCTIONS),
    **_named(tensors.along, _ALONG_AN_AXIS),
}
"""By the name of the ATen operator; its in-place form (`relu_`) has the same rule."""
