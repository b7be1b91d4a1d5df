"""PyTorch's form of each ONNX operator, for modules that are rebuilt from files.

Tensors are on the meta device; known values (shapes, axes, scales) are NumPy arrays. Forms are
chosen for the training memory of the exported models: `Linear` for a product with weights, fused
norms, views.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx.shape_inference
import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from torch import Tensor

from trappm.extensions.onnx.checked_model import FLOATS, MAX_ELEMENTS, MAX_RANK, Operation
from trappm.extensions.onnx.constant_folding import MAX_FOLDED_ELEMENTS, Array
from trappm.extensions.onnx.patterns import IN_PLACE
from trappm.profiler.errors import UnsupportedModelError, one_line

Value = Tensor | Array | None
"""A tensor on the meta device, an array of known values, or None for a missing input."""

_SAME_NAME = "uint8 int8 uint16 int16 uint32 int32 uint64 int64 bool complex64"

_TYPES: Mapping[int, torch.dtype] = {
    **{onnx.TensorProto.DataType.Value(n.upper()): getattr(torch, n) for n in _SAME_NAME.split()},
    onnx.TensorProto.UINT4: torch.uint8,
    onnx.TensorProto.INT4: torch.int8,
    # The step is one in fp32, whatever the file's precision.
    **dict.fromkeys(FLOATS, torch.float32),
}
_ONNX_TYPES = {
    **{dtype: kind for kind, dtype in reversed(list(_TYPES.items()))},
    torch.float32: onnx.TensorProto.FLOAT,
}


def torch_type(element_type: int) -> torch.dtype:
    """Return the type of a tensor by its ONNX element type; all floats are fp32.

    Raises:
        UnsupportedModelError: PyTorch has no such type.
    """
    if element_type not in _TYPES:
        names = {number: name for name, number in onnx.TensorProto.DataType.items()}
        name = names.get(element_type, f"number {element_type}")
        raise UnsupportedModelError(f"tensors of type {name} are not supported")
    return _TYPES[element_type]


def onnx_type(dtype: torch.dtype) -> int:
    """Return the element type of onnx.TensorProto."""
    return int(_ONNX_TYPES[dtype])


def as_tensor(value: Value) -> Tensor:
    """Return the value as a tensor on the meta device."""
    if isinstance(value, Tensor):
        return value
    if value is None:
        raise UnsupportedModelError("a required input is left out")
    kind = torch_type(onnx.helper.np_dtype_to_tensor_dtype(value.dtype))
    return torch.empty(value.shape, dtype=kind, device="meta")


def check_shape(name: str, shape: Sequence[int]) -> None:
    """Raise UnsupportedModelError for a tensor that is too large."""
    if len(shape) > MAX_RANK:
        raise UnsupportedModelError(f"tensor {name!r} would have {len(shape)} axes")
    if math.prod(shape) > MAX_ELEMENTS or min(shape, default=0) < 0:
        raise UnsupportedModelError(f"tensor {name!r} would have the shape {tuple(shape)}")


@dataclass(frozen=True)
class NodeCall:
    """One operator with the values of its inputs."""

    operator: str
    inputs: Sequence[Value]
    attributes: Mapping[str, Any]
    outputs: int
    opset: int
    training: bool

    def value(self, place: int) -> Value:
        return self.inputs[place] if place < len(self.inputs) else None

    def has(self, place: int) -> bool:
        return self.value(place) is not None

    def tensor(self, place: int = 0) -> Tensor:
        return as_tensor(self.value(place))

    def optional_tensor(self, place: int) -> Tensor | None:
        return self.tensor(place) if self.has(place) else None

    def operand(self, place: int) -> Any:
        """Return a tensor, or a number for a constant with one element."""
        value = self.value(place)
        if isinstance(value, np.ndarray) and value.size == 1 and value.ndim <= 1:
            return value.item()
        return as_tensor(value)

    def known_value(self, place: int) -> Array | None:
        """Return an input whose value must be known before the step runs; None if missing."""
        value = self.value(place)
        if isinstance(value, Tensor):
            raise UnsupportedModelError(f"its {self.operator} depends on unknown values")
        return value

    def ints(self, name: str, place: int | None = None) -> list[int] | None:
        """Return integers that are an attribute in older opsets and an input in newer ones."""
        if name in self.attributes:
            return [int(i) for i in np.atleast_1d(self.attributes[name])]
        value = None if place is None else self.known_value(place)
        return None if value is None else [int(i) for i in value.reshape(-1)]

    def number(self, name: str, default: float) -> float:
        return float(self.attributes.get(name, default))

    def axis(self, default: int) -> int:
        return int(self.attributes.get("axis", default))


Function = Callable[[NodeCall], Any]


def _reshape(call: NodeCall) -> Tensor:
    x, shape = call.tensor(), call.ints("shape", 1) or []
    if not call.attributes.get("allowzero"):
        shape = [x.shape[i] if size == 0 else size for i, size in enumerate(shape)]
    return x.reshape(shape)


def _flatten(call: NodeCall) -> Tensor:
    x = call.tensor()
    axis = call.axis(1)
    axis += x.dim() if axis < 0 else 0
    if axis == 1:
        return x.flatten(1)
    if axis == x.dim() - 1:
        return x.flatten(0, -2)
    return x.reshape(math.prod(x.shape[:axis]), -1)


def _transpose(call: NodeCall) -> Tensor:
    x = call.tensor()
    return x.permute(call.ints("perm") or list(reversed(range(x.dim()))))


def _squeeze(call: NodeCall) -> Tensor:
    x, axes = call.tensor(), call.ints("axes", 1)
    return x.squeeze() if axes is None else x.squeeze(axes)


def _unsqueeze(call: NodeCall) -> Tensor:
    x, axes = call.tensor(), call.ints("axes", 1) or []
    rank = x.dim() + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _expand(call: NodeCall) -> Tensor:
    x, shape = call.tensor(), call.ints("shape", 1) or []
    added = [1] * (len(shape) - x.dim())
    sizes = [*added, *x.shape]
    wanted = [1] * (len(sizes) - len(shape)) + shape
    return x.expand([n if w == 1 else w for n, w in zip(sizes, wanted, strict=True)])


def _slice(call: NodeCall) -> Tensor:
    x = call.tensor()
    starts, ends = call.ints("starts", 1) or [], call.ints("ends", 2) or []
    axes = call.ints("axes", 3) or list(range(len(starts)))
    steps = call.ints("steps", 4) or [1] * len(starts)
    turned = []
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        size = x.shape[axis]
        if step < 0:
            if (start, step) not in ((-1, -1), (size - 1, -1)) or end >= -size:
                raise UnsupportedModelError("a Slice with a negative step")
            turned.append(axis)
            continue
        span = range(size)[start:end:step]
        if len(span) < size:  # PyTorch skips slices that take all
            first = span.start
            x = x[(slice(None),) * (axis % x.dim()) + (slice(first, span.stop, step),)]
    return x.flip(turned) if turned else x


def _split(call: NodeCall) -> Sequence[Tensor]:
    x, axis = call.tensor(), call.axis(0)
    sizes = call.ints("split", 1)
    if sizes is None:
        each = -(-x.shape[axis] // call.outputs)
        return torch.split(x, each, axis)
    return torch.split(x, sizes, axis)


def _pad(call: NodeCall) -> Tensor:
    x, pads = call.tensor(), call.ints("pads", 1) or []
    rank = x.dim()
    axes = call.ints("axes", 3)
    amounts = {axis % rank: pair for axis, *pair in zip(
        axes or range(rank), pads[: len(pads) // 2], pads[len(pads) // 2 :], strict=True
    )}  # fmt: skip
    flat = [amount for axis in reversed(range(rank)) for amount in amounts.get(axis, (0, 0))]
    mode = str(call.attributes.get("mode", "constant"))
    mode = {"edge": "replicate", "wrap": "circular"}.get(mode, mode)
    if mode == "constant":
        while len(flat) > 2 and flat[-2:] == [0, 0]:
            flat = flat[:-2]
        return F.pad(x, flat)
    return F.pad(x, flat[: 2 * (rank - 2)], mode=mode)


def _resize(call: NodeCall) -> Tensor:
    x = call.tensor()
    sizes, scales = call.known_value(3), call.known_value(2)
    if sizes is not None and sizes.size:
        target = [int(size) for size in sizes][-(x.dim() - 2) :]
    elif scales is not None and scales.size:
        factors = [float(scale) for scale in scales][-(x.dim() - 2) :]
        target = [math.floor(n * f) for n, f in zip(x.shape[2:], factors, strict=True)]
    else:
        raise UnsupportedModelError("a Resize without a size")
    mode = str(call.attributes.get("mode", "nearest"))
    if mode == "nearest":
        return F.interpolate(x, target)
    align = call.attributes.get("coordinate_transformation_mode") == "align_corners"
    name = "bicubic" if mode == "cubic" else "bilinear"
    return F.interpolate(x, target, mode=name, align_corners=align)


def _gather(call: NodeCall) -> Tensor:
    x, axis, index = call.tensor(), call.axis(0), call.value(1)
    if isinstance(index, np.ndarray) and index.ndim == 0:
        return x.select(axis, int(index))
    table = call.tensor(1)
    return x[(slice(None),) * (axis % x.dim()) + (table,)]


def _gather_nd(call: NodeCall) -> Tensor:
    x, index = call.tensor(), call.tensor(1)
    if call.attributes.get("batch_dims"):
        raise UnsupportedModelError("a GatherND with batch axes")
    return x[_index_of(x, index)]


def _scatter_nd(call: NodeCall) -> Tensor:
    x, index, updates = (call.tensor(i) for i in range(3))
    return x.index_put(_index_of(x, index), updates)


def _index_of(x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    """Return a tensor of indices for each indexed axis."""
    if index.shape[-1] > x.dim():
        raise UnsupportedModelError(f"places of {index.shape[-1]} axes in a tensor of {x.dim()}")
    return tuple(index.unbind(-1))


def _one_hot(call: NodeCall) -> Sequence[Value]:
    """Return known values only: exporters write an index of PyTorch so."""
    places, depth, values = (call.known_value(i) for i in range(3))
    if places is None or depth is None or values is None or call.axis(-1) != -1:
        raise UnsupportedModelError("a OneHot along another axis than the last")
    if places.size * depth.item() > MAX_FOLDED_ELEMENTS:
        raise UnsupportedModelError(f"a OneHot of more than {MAX_FOLDED_ELEMENTS} elements")
    hot = places[..., None] == np.arange(depth.item())
    return [np.where(hot, values[1], values[0])]


def _assign_slice(call: NodeCall) -> Tensor:
    """Assign to a slice; the position of the slice is irrelevant."""
    x, part = call.tensor(0).clone(), call.tensor(1)
    if x.dim() == part.dim():
        pairs = zip(part.shape, x.shape, strict=True)
        place = x[tuple(slice(None) if size == whole else slice(size) for size, whole in pairs)]
    else:
        place, part = x.view(-1)[: part.numel()], part.reshape(-1)
    place.copy_(part)
    return x


def _cast(call: NodeCall) -> Tensor:
    x = call.tensor()
    to = torch_type(int(call.attributes["to"])) if call.operator == "Cast" else call.tensor(1).dtype
    return x.to(to)


def _constant_of_shape(call: NodeCall) -> Tensor:
    shape, value = call.ints("shape", 0) or [], call.attributes.get("value")
    kind = torch.float32 if value is None else torch_type(value.data_type)
    return torch.empty(shape, dtype=kind, device="meta")


def _range(call: NodeCall) -> Tensor:
    start, stop, step = (call.known_value(i) for i in range(3))
    if start is None or stop is None or step is None:
        raise UnsupportedModelError("a Range without its bounds")
    count = max(math.ceil((stop.item() - start.item()) / step.item()), 0)
    kind = torch_type(onnx.helper.np_dtype_to_tensor_dtype(start.dtype))
    return torch.empty(count, dtype=kind, device="meta")


def _top_k(call: NodeCall) -> Sequence[Tensor]:
    count = (call.ints("k", 1) or [1])[0]
    return torch.topk(call.tensor(), count, call.axis(-1))


def _depth_to_space(call: NodeCall) -> Tensor:
    x, block = call.tensor(), int(call.attributes["blocksize"])
    if call.operator == "SpaceToDepth":
        return F.pixel_unshuffle(x, block)
    return F.pixel_shuffle(x, block)


def _grid_sample(call: NodeCall) -> Tensor:
    mode = str(call.attributes.get("mode", "bilinear"))
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    edges = str(call.attributes.get("padding_mode", "zeros"))
    align = bool(call.attributes.get("align_corners", 0))
    return F.grid_sample(call.tensor(0), call.tensor(1), mode, edges, align)


def _trilu(call: NodeCall) -> Tensor:
    known = call.known_value(1)
    diagonal = 0 if known is None else int(known.item())
    function = torch.triu if call.attributes.get("upper", 1) else torch.tril
    return function(call.tensor(), diagonal)


MOVES: Mapping[str, Function] = {
    "TopK": _top_k,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Transpose": _transpose,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Expand": _expand,
    "Tile": lambda call: call.tensor().repeat(call.ints("repeats", 1) or []),
    "Concat": lambda call: torch.cat(
        [call.tensor(i) for i in range(len(call.inputs))], call.axis(0)
    ),
    "Split": _split,
    "Slice": _slice,
    "Pad": _pad,
    "Resize": _resize,
    "Gather": _gather,
    "GatherND": _gather_nd,
    "GatherElements": lambda call: call.tensor().gather(call.axis(0), call.tensor(1)),
    "ScatterND": _scatter_nd,
    "ScatterElements": lambda call: call.tensor().scatter(
        call.axis(0), call.tensor(1), call.tensor(2)
    ),
    "OneHot": _one_hot,
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _depth_to_space,
    "GridSample": _grid_sample,
    "Trilu": _trilu,
    "Cast": _cast,
    "CastLike": _cast,
    "ConstantOfShape": _constant_of_shape,
    "Range": _range,
    "trappm.WrittenInto": _assign_slice,
}


def _unary(function: Callable[[Tensor], Tensor]) -> Function:
    return lambda call: function(call.tensor())


def _binary(function: Callable[[Any, Any], Tensor]) -> Function:
    def run(call: NodeCall) -> Tensor:
        first, second = call.operand(0), call.operand(1)
        if not isinstance(first, Tensor) and not isinstance(second, Tensor):
            first = call.tensor(0)
        return function(first, second)

    return run


def _activation(function: Callable[..., Tensor]) -> Function:
    return lambda call: function(call.tensor(), inplace=bool(call.attributes.get(IN_PLACE)))


def _chain(function: Callable[[Tensor, Tensor], Tensor]) -> Function:
    """Return a function that applies `function` to any number of inputs, pair by pair."""

    def run(call: NodeCall) -> Tensor:
        result = call.tensor(0)
        for place in range(1, len(call.inputs)):
            result = function(result, call.tensor(place))
        return result

    return run


def _reduction(function: Callable[[Tensor, list[int], bool], Tensor]) -> Function:
    def run(call: NodeCall) -> Tensor:
        x = call.tensor()
        axes = call.ints("axes", 1)
        if not axes:
            if call.attributes.get("noop_with_empty_axes"):
                return x
            axes = list(range(x.dim()))
        return function(x, axes, bool(call.attributes.get("keepdims", 1)))

    return run


def _method(name: str) -> Callable[[Tensor, list[int], bool], Tensor]:
    return lambda x, axes, keep: getattr(x, name)(axes, keepdim=keep)


def _index_reduction(function: Callable[..., Tensor]) -> Function:
    return lambda call: function(
        call.tensor(), call.axis(0), bool(call.attributes.get("keepdims", 1))
    )


def _window(call: NodeCall, x: Tensor, kernel: Sequence[int]) -> tuple[Tensor, list[int], Any, Any]:
    """Return the input, padded if its padding is asymmetric; padding, strides, dilations."""
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


def _convolution(call: NodeCall) -> Tensor:
    weight = call.tensor(1)
    x, pads, strides, dilations = _window(call, call.tensor(), weight.shape[2:])
    groups = int(call.attributes.get("group", 1))
    function = (F.conv1d, F.conv2d, F.conv3d)[weight.dim() - 3]
    return function(x, weight, call.optional_tensor(2), strides, pads, dilations, groups)


def _transposed_convolution(call: NodeCall) -> Tensor:
    weight = call.tensor(1)
    rank = weight.dim() - 2
    if "output_shape" in call.attributes or call.attributes.get("auto_pad", "NOTSET") != "NOTSET":
        raise UnsupportedModelError("a ConvTranspose whose padding depends on its output's shape")
    pads = call.ints("pads") or [0] * (2 * rank)
    more = call.ints("output_padding") or [0] * rank
    # What ONNX cuts off at the end beyond the beginning is less output padding.
    extra = [more[i] + pads[i] - pads[i + rank] for i in range(rank)]
    function: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]
    result: Tensor = function(
        call.tensor(), weight, call.optional_tensor(2), call.ints("strides") or [1] * rank,
        pads[:rank], extra, int(call.attributes.get("group", 1)),
        call.ints("dilations") or [1] * rank,
    )  # fmt: skip
    return result


def _max_pool(call: NodeCall) -> Tensor:
    kernel = call.ints("kernel_shape") or []
    x, pads, strides, dilations = _window(call, call.tensor(), kernel)
    function = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(kernel) - 1]
    ceil = bool(call.attributes.get("ceil_mode", 0))
    result: Tensor = function(x, kernel, strides, pads, dilations, ceil)
    return result


def _average_pool(call: NodeCall) -> Tensor:
    kernel = call.ints("kernel_shape") or []
    x, pads, strides, dilations = _window(call, call.tensor(), kernel)
    if set(dilations) != {1}:
        raise UnsupportedModelError("an AveragePool with dilations")
    function: Any = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(kernel) - 1]
    ceil = bool(call.attributes.get("ceil_mode", 0))
    with_pads = bool(call.attributes.get("count_include_pad", 0))
    result: Tensor = function(x, kernel, strides, pads, ceil, with_pads)
    return result


def _global_pool(call: NodeCall) -> Tensor:
    x, largest = call.tensor(), call.operator == "GlobalMaxPool"
    if x.dim() == 4:
        return F.adaptive_max_pool2d(x, 1) if largest else F.adaptive_avg_pool2d(x, 1)
    axes = list(range(2, x.dim()))
    return x.amax(axes, keepdim=True) if largest else x.mean(axes, keepdim=True)


def _batch_norm(call: NodeCall) -> Tensor:
    x, weight, bias, mean, variance = (call.tensor(i) for i in range(5))
    # Standardised weights are written as a norm whose statistics are made of the weights.
    made = call.training and (mean.requires_grad or variance.requires_grad)
    running = (None, None) if made else (mean, variance)
    return F.batch_norm(x, running[0], running[1], weight, bias, call.training, eps=_epsilon(call))


def _epsilon(call: NodeCall) -> float:
    return call.number("epsilon", 1e-5)


def _layer_norm(call: NodeCall) -> Tensor:
    x = call.tensor()
    shape = x.shape[call.axis(-1) % x.dim() :]
    weight, bias = (
        None if t is None else t.reshape(shape) for t in map(call.optional_tensor, (1, 2))
    )
    return F.layer_norm(x, shape, weight, bias, _epsilon(call))


def _rms_norm(call: NodeCall) -> Tensor:
    x = call.tensor()
    shape = x.shape[call.axis(-1) % x.dim() :]
    weight = call.optional_tensor(1)
    return F.rms_norm(x, shape, None if weight is None else weight.reshape(shape), _epsilon(call))


def _group_norm(call: NodeCall) -> Tensor:
    x, weight, bias = (call.tensor(i) for i in range(3))
    groups = int(call.attributes["num_groups"])
    if weight.numel() != x.shape[1]:  # opset 18: one weight a group
        size = x.shape[1] // groups
        weight, bias = (t.repeat_interleave(size, output_size=x.shape[1]) for t in (weight, bias))
    return F.group_norm(x, groups, weight.reshape(-1), bias.reshape(-1), _epsilon(call))


def _instance_norm(call: NodeCall) -> Tensor:
    x, weight, bias = (call.tensor(i) for i in range(3))
    return F.instance_norm(x, weight=weight, bias=bias, eps=_epsilon(call))


def _addition(call: NodeCall) -> Tensor:
    first, second = call.operand(0), call.operand(1)
    if call.attributes.get(IN_PLACE):
        return call.tensor(0).add_(second)
    return torch.add(first if isinstance(second, Tensor) else call.tensor(0), second)


def _linear(call: NodeCall) -> Tensor:
    """Return a product with weights, and a bias if the file adds one."""
    x, weight, bias = call.tensor(0), call.tensor(1), call.optional_tensor(2)
    if weight.dim() == 2 and (bias is None or bias.dim() == 1):
        return F.linear(x, weight.t(), bias)
    product = x @ weight
    return product if bias is None else product + bias


def _gemm(call: NodeCall) -> Tensor:
    x, weight, bias = call.tensor(0), call.tensor(1), call.optional_tensor(2)
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


def _attention(call: NodeCall) -> Tensor:
    """Return the operator of opset 23, for queries, keys and values of four axes."""
    query, key, value = (call.tensor(i) for i in range(3))
    if query.dim() != 4 or call.outputs > 1 or call.has(4):
        raise UnsupportedModelError("an Attention with a cache, or of three axes")
    causal = bool(call.attributes.get("is_causal", 0))
    return F.scaled_dot_product_attention(
        query, key, value, call.optional_tensor(3), is_causal=causal
    )


def _scaled_attention(call: NodeCall) -> Tensor:
    """Return attention of queries, transposed keys, values, and a mask."""
    query, keys, value = (call.tensor(i) for i in range(3))
    return F.scaled_dot_product_attention(
        query, keys.transpose(-2, -1), value, None if not call.has(3) else call.tensor(3)
    )


def _recurrent(call: NodeCall) -> Sequence[Tensor]:
    """Return outputs (T, directions, B, width) and last states of an LSTM, GRU or RNN."""
    if not call.training:  # its graph has the file's own node
        raise UnsupportedModelError(f"the operator {call.operator} is not rebuilt in inference")
    x, weights, recurrences = (call.tensor(i) for i in range(3))
    batch_first = bool(call.attributes.get("layout", 0))
    x = x.transpose(0, 1) if batch_first else x
    directions, width = recurrences.shape[0], recurrences.shape[2]
    activations = [name.lower() for name in call.attributes.get("activations", ())]
    names = {
        "LSTM": "lstm",
        "GRU": "gru",
        "RNN": "rnn_relu" if "relu" in activations else "rnn_tanh",
    }
    flat: list[Tensor] = []
    for i in range(directions):
        flat += weights[i], recurrences[i]
        if call.has(3):
            flat += call.tensor(3)[i].chunk(2)
    empty = x.new_zeros(directions, x.shape[1], width)
    places = (5, 6) if call.operator == "LSTM" else (5,)
    states = [state if (state := call.optional_tensor(i)) is not None else empty for i in places]
    if batch_first:
        states = [state if state is empty else state.transpose(0, 1) for state in states]
    output, *last = getattr(torch, names[call.operator])(
        x, tuple(states) if len(states) > 1 else states[0], flat, call.has(3), 1, 0.0,
        call.training, directions == 2, False,
    )  # fmt: skip
    output = output.unflatten(-1, (directions, width)).transpose(1, 2)
    if batch_first:
        output, last = output.permute(2, 0, 1, 3), [state.transpose(0, 1) for state in last]
    return output, *last


def _clip(call: NodeCall) -> Tensor:
    x = call.tensor()
    low = call.attributes.get("min", call.operand(1) if call.has(1) else None)
    high = call.attributes.get("max", call.operand(2) if call.has(2) else None)
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return torch.clamp(x, low, high)
    if low is None or high is None:
        return torch.clamp(x, low, high)
    return F.hardtanh(x, low, high, bool(call.attributes.get(IN_PLACE)))


def _softmax(call: NodeCall) -> Tensor:
    x = call.tensor()
    function = torch.log_softmax if call.operator == "LogSoftmax" else torch.softmax
    axis = call.axis(-1 if call.opset >= 13 else 1) % x.dim()
    if call.opset < 13 and axis != x.dim() - 1:  # was defined over all axes from this one on
        return function(x.flatten(axis), -1).reshape(x.shape)
    return function(x, axis)


def _lp_normalization(call: NodeCall) -> Tensor:
    order = int(call.attributes.get("p", 2))
    return F.normalize(call.tensor(), p=order, dim=call.axis(-1))


def _dropout(call: NodeCall) -> Any:
    ratio = call.known_value(1) if call.opset >= 12 else None
    share = call.number("ratio", 0.5) if ratio is None else float(ratio.item())
    x = F.dropout(call.tensor(), share, call.training and share > 0)
    return [x, x] if call.outputs > 1 else x


_UNARY = "Abs Neg Sign Sqrt Reciprocal Exp Log Erf Sin Cos Floor Ceil Round Sigmoid Tanh IsNaN"

_BINARY: Mapping[str, Callable[[Any, Any], Tensor]] = {
    "Sub": operator.sub, "Mul": operator.mul, "Pow": operator.pow, "Mod": operator.mod,
    "Equal": operator.eq, "Less": operator.lt, "LessOrEqual": operator.le,
    "Greater": operator.gt, "GreaterOrEqual": operator.ge,
}  # fmt: skip
_REDUCTIONS = {
    "ReduceMean": "mean", "ReduceSum": "sum", "ReduceMax": "amax", "ReduceMin": "amin",
    "ReduceLogSumExp": "logsumexp", "trappm.Variance": "var",
}  # fmt: skip
"""Methods of tensors by the operators that reduce axes."""

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
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent),
    # norms and pools
    "BatchNormalization": _batch_norm,
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm,
    "GroupNormalization": _group_norm,
    "InstanceNormalization": _instance_norm,
    "LpNormalization": _lp_normalization,
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
    "HardSwish": _activation(F.hardswish),
    "HardSigmoid": _unary(F.hardsigmoid),
    "Elu": lambda call: F.elu(call.tensor(), call.number("alpha", 1)),
    "Celu": lambda call: F.celu(call.tensor(), call.number("alpha", 1)),
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
    "Div": lambda call: torch.div(call.tensor(0), call.operand(1)),
    "Max": _chain(torch.maximum),
    "Min": _chain(torch.minimum),
    "Sum": _chain(torch.add),
    "And": _chain(torch.logical_and),
    "Or": _chain(torch.logical_or),
    "Not": _unary(torch.logical_not),
    "Where": lambda call: torch.where(call.tensor(0), call.operand(1), call.operand(2)),
    **{name: _binary(function) for name, function in _BINARY.items()},
    **{name: _unary(getattr(torch, name.lower())) for name in _UNARY.split()},
    **{name: _unary(getattr(F, name.lower())) for name in ("Mish", "Selu", "Softplus", "Softsign")},
    # reductions
    **{name: _reduction(_method(method)) for name, method in _REDUCTIONS.items()},
    "ReduceL1": _reduction(lambda x, axes, keep: x.norm(p=1, dim=axes, keepdim=keep)),
    "ReduceL2": _reduction(lambda x, axes, keep: x.norm(p=2, dim=axes, keepdim=keep)),
    "ReduceSumSquare": _reduction(lambda x, axes, keep: (x * x).sum(axes, keepdim=keep)),
    "ArgMax": _index_reduction(torch.argmax),
    "ArgMin": _index_reduction(torch.argmin),
    "CumSum": lambda call: call.tensor().cumsum((call.ints("axis", 1) or [0])[0]),
    **MOVES,
    # what `patterns` puts together again
    "trappm.Linear": _linear,
    "trappm.Rsqrt": _unary(torch.rsqrt),
    "trappm.ScaledAttention": _scaled_attention,
    "trappm.Silu": _activation(F.silu),
}
"""PyTorch's form of each operator that modules can be rebuilt from."""


# Their shapes are what ONNX's own inference says of the single node. In PyTorch they are calls of
# `trappm::onnx`, an operator that makes tensors of these shapes and computes nothing.

_LIBRARY = torch.library.Library("trappm", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "onnx(Tensor[] inputs, str operator, str attributes, int[] ranks, int[] sizes, ScalarType[] "
    "types, str refusal) -> Tensor[]"
)


def _make(
    inputs: Sequence[Tensor],
    operator: str,
    attributes: str,
    ranks: Sequence[int],
    sizes: Sequence[int],
    types: Sequence[torch.dtype],
    _refusal: str,
) -> list[Tensor]:
    rest = iter(sizes)
    return [
        torch.empty([next(rest) for _ in range(rank)], dtype=dtype, device="meta")
        for rank, dtype in zip(ranks, types, strict=True)
    ]


_LIBRARY.impl("onnx", _make, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Dialect:
    """Versions of operators in a file."""

    opsets: Sequence[onnx.OperatorSetIdProto]
    ir_version: int

    def version(self, domain: str) -> int:
        """Return the version of a domain; the empty one is ONNX's own."""
        names = ("", "ai.onnx") if domain in ("", "ai.onnx") else (domain,)
        return max((o.version for o in self.opsets if o.domain in names), default=1)


def run_unknown(
    operation: Operation, inputs: Sequence[Value], dialect: Dialect, refusal: str
) -> list[Value]:
    """Return outputs without values, of the shapes that ONNX infers.

    A step with such an operator has a graph only; `refusal` is the reason.

    Raises:
        UnsupportedModelError: ONNX infers none.
    """
    node = operation.node
    if node is None:
        raise UnsupportedModelError(f"{operation.operator} cannot be rebuilt")
    given: dict[str, onnx.TypeProto] = {}
    data: dict[str, onnx.TensorProto] = {}
    try:
        for name, value in zip(operation.inputs, inputs, strict=True):
            if isinstance(value, np.ndarray):
                data[name] = onnx.numpy_helper.from_array(value, name)
                kind = data[name].data_type
            elif value is not None:
                kind = onnx_type(value.dtype)
            else:
                continue
            given[name] = onnx.helper.make_tensor_type_proto(kind, value.shape)
        version = dialect.version(node.domain)
        types = onnx.shape_inference.infer_node_outputs(
            onnx.defs.get_schema(node.op_type, version, node.domain),
            node,
            given,
            data,
            opset_imports=list(dialect.opsets),
            ir_version=dialect.ir_version,
        )
    except Exception as error:
        raise UnsupportedModelError(
            f"ONNX cannot infer the shape of {operation.operator} {node.name!r}: {one_line(error)}"
        ) from error
    inferred = [
        (name, *_sizes_and_type(types[name])) for name in operation.outputs if name in types
    ]
    known = [(name, sizes, kind) for name, sizes, kind in inferred if sizes is not None]
    for name, sizes, _ in known:
        check_shape(name, sizes)
    made = torch.ops.trappm.onnx(
        [torch.empty((), device="meta") if value is None else as_tensor(value) for value in inputs],
        operation.operator,
        json.dumps(dict(operation.attributes), default=lambda value: type(value).__name__),
        [len(sizes) for _, sizes, _ in known],
        [size for _, sizes, _ in known for size in sizes],
        [torch_type(kind) for _, _, kind in known],
        refusal,
    )
    outputs = dict(zip((name for name, _, _ in known), made, strict=True))
    return [outputs.get(name) for name in operation.outputs]


def _sizes_and_type(kind_and_shape: onnx.TypeProto) -> tuple[list[int] | None, int]:
    """Return the sizes, if all are known, and the element type of an output."""
    tensor = kind_and_shape.tensor_type
    axes = tensor.shape.dim
    if not tensor.HasField("shape") or not all(axis.HasField("dim_value") for axis in axes):
        return None, tensor.elem_type
    return [axis.dim_value for axis in axes], tensor.elem_type
