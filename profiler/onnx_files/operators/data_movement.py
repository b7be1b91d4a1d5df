"""ONNX operators that move, pick or make data, in PyTorch; `arithmetic` has the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from torch import Tensor

from trappm.profiler.errors import UnsupportedModelError
from trappm.profiler.onnx_files.folding import MAX_ELEMENTS
from trappm.profiler.onnx_files.operators.call import Call, Function, Value, torch_type


def _reshape(call: Call) -> Tensor:
    x, shape = call.tensor(), call.ints("shape", 1) or []
    if not call.attributes.get("allowzero"):
        shape = [x.shape[i] if size == 0 else size for i, size in enumerate(shape)]
    return x.reshape(shape)


def _flatten(call: Call) -> Tensor:
    x = call.tensor()
    axis = call.axis(1)
    axis += x.dim() if axis < 0 else 0
    if axis == 1:
        return x.flatten(1)
    if axis == x.dim() - 1:
        return x.flatten(0, -2)
    return x.reshape(math.prod(x.shape[:axis]), -1)


def _transpose(call: Call) -> Tensor:
    x = call.tensor()
    return x.permute(call.ints("perm") or list(reversed(range(x.dim()))))


def _squeeze(call: Call) -> Tensor:
    x, axes = call.tensor(), call.ints("axes", 1)
    return x.squeeze() if axes is None else x.squeeze(axes)


def _unsqueeze(call: Call) -> Tensor:
    x, axes = call.tensor(), call.ints("axes", 1) or []
    rank = x.dim() + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _expand(call: Call) -> Tensor:
    x, shape = call.tensor(), call.ints("shape", 1) or []
    added = [1] * (len(shape) - x.dim())
    sizes = [*added, *x.shape]
    wanted = [1] * (len(sizes) - len(shape)) + shape
    return x.expand([n if w == 1 else w for n, w in zip(sizes, wanted, strict=True)])


def _slice(call: Call) -> Tensor:
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


def _split(call: Call) -> Sequence[Tensor]:
    x, axis = call.tensor(), call.axis(0)
    sizes = call.ints("split", 1)
    if sizes is None:
        each = -(-x.shape[axis] // call.outputs)
        return torch.split(x, each, axis)
    return torch.split(x, sizes, axis)


def _pad(call: Call) -> Tensor:
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


def _resize(call: Call) -> Tensor:
    x = call.tensor()
    sizes, scales = call.known(3), call.known(2)
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


def _gather(call: Call) -> Tensor:
    x, axis, index = call.tensor(), call.axis(0), call.value(1)
    if isinstance(index, np.ndarray) and index.ndim == 0:
        return x.select(axis, int(index))
    table = call.tensor(1)
    return x[(slice(None),) * (axis % x.dim()) + (table,)]


def _gather_nd(call: Call) -> Tensor:
    x, index = call.tensor(), call.tensor(1)
    if call.attributes.get("batch_dims"):
        raise UnsupportedModelError("a GatherND with batch axes")
    return x[_places(x, index)]


def _scatter_nd(call: Call) -> Tensor:
    x, index, updates = (call.tensor(i) for i in range(3))
    return x.index_put(_places(x, index), updates)


def _places(x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    """One tensor of places for each axis that is indexed."""
    if index.shape[-1] > x.dim():
        raise UnsupportedModelError(f"places of {index.shape[-1]} axes in a tensor of {x.dim()}")
    return tuple(index.unbind(-1))


def _one_hot(call: Call) -> Sequence[Value]:
    """Known positions only: exporters write so what an index of PyTorch does to a shape."""
    places, depth, values = (call.known(i) for i in range(3))
    if places is None or depth is None or values is None or call.axis(-1) != -1:
        raise UnsupportedModelError("a OneHot along another axis than the last")
    if places.size * depth.item() > MAX_ELEMENTS:
        raise UnsupportedModelError(f"a OneHot of more than {MAX_ELEMENTS} elements")
    hot = places[..., None] == np.arange(depth.item())
    return [np.where(hot, values[1], values[0])]


def _written_into(call: Call) -> Tensor:
    """What assigning to a slice does; where the slice lies makes no difference."""
    x, part = call.tensor(0).clone(), call.tensor(1)
    if x.dim() == part.dim():
        pairs = zip(part.shape, x.shape, strict=True)
        place = x[tuple(slice(None) if size == whole else slice(size) for size, whole in pairs)]
    else:
        place, part = x.view(-1)[: part.numel()], part.reshape(-1)
    place.copy_(part)
    return x


def _cast(call: Call) -> Tensor:
    x = call.tensor()
    to = torch_type(int(call.attributes["to"])) if call.operator == "Cast" else call.tensor(1).dtype
    return x.to(to)


def _filled(call: Call) -> Tensor:
    shape, value = call.ints("shape", 0) or [], call.attributes.get("value")
    kind = torch.float32 if value is None else torch_type(value.data_type)
    return torch.empty(shape, dtype=kind, device="meta")


def _range(call: Call) -> Tensor:
    start, stop, step = (call.known(i) for i in range(3))
    if start is None or stop is None or step is None:
        raise UnsupportedModelError("a Range without its bounds")
    count = max(math.ceil((stop.item() - start.item()) / step.item()), 0)
    kind = torch_type(onnx.helper.np_dtype_to_tensor_dtype(start.dtype))
    return torch.empty(count, dtype=kind, device="meta")


def _top_k(call: Call) -> Sequence[Tensor]:
    count = (call.ints("k", 1) or [1])[0]
    return torch.topk(call.tensor(), count, call.axis(-1))


def _depth_to_space(call: Call) -> Tensor:
    x, block = call.tensor(), int(call.attributes["blocksize"])
    if call.operator == "SpaceToDepth":
        return F.pixel_unshuffle(x, block)
    return F.pixel_shuffle(x, block)


def _grid_sample(call: Call) -> Tensor:
    mode = str(call.attributes.get("mode", "bilinear"))
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    edges = str(call.attributes.get("padding_mode", "zeros"))
    align = bool(call.attributes.get("align_corners", 0))
    return F.grid_sample(call.tensor(0), call.tensor(1), mode, edges, align)


def _trilu(call: Call) -> Tensor:
    known = call.known(1)
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
    "ConstantOfShape": _filled,
    "Range": _range,
    "trappm.WrittenInto": _written_into,
}
