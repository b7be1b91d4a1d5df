"""Kernels of workloads as arrays, the input of `kernel_times`.

No value here is fitted: sizes and classes follow from the kernels and the device specification.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trappm.learner.physics.device_specs import DeviceSpec
from trappm.learner.workload import Array, BoolArray, IntArray, Workload, cached_with_first
from trappm.profiler.errors import InputError
from trappm.profiler.records import Optimizer, Phase, Precision
from trappm.profiler.records.kernels import KernelKind, Kernels, Pass, Size

Indices = IntArray

PRODUCTS = 7
"""Number of kinds that multiply; the following kinds are bound by memory."""
STREAMS = len(KernelKind) - PRODUCTS
PASSES = len(Pass)

# Number of classes per kind: a library has different kernels for convolutions of different shape.
DETAILS = {
    KernelKind.POINTWISE: 2,
    KernelKind.DENSE: 7,
    KernelKind.GROUPED: 7,
    KernelKind.DEPTHWISE: 10,
    KernelKind.LINEAR: 1,
    KernelKind.MATMUL: 1,
    KernelKind.ATTENTION: 1,
}
_FIRST_DETAIL = np.cumsum([0, *DETAILS.values()])
DETAIL_COUNT = int(_FIRST_DETAIL[-1])


class Peak(IntEnum):
    """Peak rate that limits the arithmetic of a kernel that multiplies."""

    FULL = 0
    HALF = 1
    TF32 = 2
    """fp32 convolutions on devices with TF32, except depthwise ones. By default, PyTorch allows it
    in cuDNN but not in cuBLAS; `profiler.devices.gpu.cuda` sets the same."""


FEW_GROUPS = 16
"""Largest number of groups with slow kernels; with 18 groups and more, kernels are fast."""

CACHE_KNOTS = np.log([1 / 16, 1 / 4, 1, 4])
"""Logarithms of the ratio of bytes touched to cache size."""

ALIGNED_AXES = 3
"""Number of aligned axes: rows (pixels of an image for convolutions), columns and depth."""

TILES = ((256, 128), (128, 64), (64, 32))
"""Rows and columns of the result that one unit computes at a time; a library chooses."""
_SPLITS = (1, 2, 4, 8, 16, 32, 64)
"""Parts that the depth of a product may be cut into (split-k)."""
_LEAST_DEPTH_OF_A_SPLIT = 256
"""Least depth of a part. A round number: the limits of the libraries are not published."""

BYTES_PER_PARAMETER = {
    Optimizer.SGD: 12.0, Optimizer.MOMENTUM: 20.0, Optimizer.ADAM: 28.0, Optimizer.ADAMW: 28.0
}  # fmt: skip
"""Bytes read and written by an update in fp32."""


@dataclass(frozen=True, eq=False)
class Streams:
    """The S memory-bound kernels of all workloads, concatenated."""

    owner: Tensor
    """Workload of each kernel (S); all further arrays have one row per kernel."""
    count: Tensor
    kind: Tensor
    """Counted from 0."""
    backward: Tensor
    """0 or 1, as for `half` and `last`."""
    half: Tensor
    last: Tensor
    log_bytes: Tensor
    cache: Tensor
    """Weights of the `CACHE_KNOTS` for the bytes touched (S, knots)."""
    columns: Tensor
    """`Size.COLUMNS`; 0 for kernels without a shape."""


@dataclass(frozen=True, eq=False)
class Products:
    """The P kernels that multiply of all workloads, concatenated."""

    owner: Tensor
    """Workload of each kernel (P); all further arrays have one row per kernel."""
    count: Tensor
    base: Tensor
    """Kind and pass."""
    like: Tensor
    """Kind and pass with the same speed; differs from `base` only for `_like_forward`."""
    detail: Tensor
    """Class among those of its kind, such as a window of 3 with a stride."""
    peak: Tensor
    """Its `Peak`."""
    last: Tensor
    """1 for channels-last."""
    full: Tensor
    """1 for fp32 without TF32: no tensor cores."""
    winograd: Tensor
    """1 where the library may take an algorithm with fewer operations than are counted."""
    reordered: Tensor
    """1 where the library needs a different layout than the tensors have."""
    log_flops: Tensor
    log_bytes: Tensor
    columns: Tensor
    depth: Tensor
    narrowest: Tensor
    """Smaller of the columns and the depth per pixel of the window."""
    pixels: Tensor
    """Pixels of a convolution's result; 1e6 for other kinds."""
    alignment: Tensor
    """Alignment of each axis (P, axes): 0 for multiples of 8, 1 for even, 2 for odd sizes."""
    tiles: Tensor
    """Log ratio of work to useful work for each of `TILES` (P, tiles); 0 for untiled kernels."""


@dataclass(frozen=True, eq=False)
class Terms:
    """Terms of the formula for n workloads."""

    streams: Streams
    products: Products
    dispatches: Tensor
    """Number of kernels of forward pass, backward pass and optimizer (n, 3)."""
    optimizer_bytes: Tensor
    """Bytes read and written by the optimizer (n)."""
    copied_bytes: Tensor
    """Bytes copied from host to device (n)."""
    waits_for_host: Tensor
    """1, or 0 if only kernels are timed (n)."""


def terms_of(workloads: Sequence[Workload], spec: DeviceSpec) -> Terms:
    """Return the terms of workloads on a device.

    Raises:
        InputError: a workload without kernels.
    """
    parts = [_parts(workload, spec) for workload in workloads]
    streams, products, steps = zip(*parts, strict=True)
    return Terms(
        streams=Streams(**_joined(streams)),
        products=Products(**_joined(products)),
        **{n: torch.from_numpy(np.array([step[n] for step in steps])) for n in steps[0]},
    )


_Rows = dict[str, npt.NDArray[Any]]


@cached_with_first
def _parts(workload: Workload, spec: DeviceSpec) -> tuple[_Rows, _Rows, dict[str, Any]]:
    """Return streams, products, and the other `Terms` of one workload."""
    traced = workload.kernels
    if traced is None:
        raise InputError("a workload without kernels has no simulated step time")
    kernels = traced.at(workload.batch_size)
    table = kernels.table
    forward = table.passes == Pass.FORWARD
    scope = workload.scope
    updates = workload.phase is Phase.TRAIN and scope.updates
    dispatches = [
        table.counts[forward].sum(),
        table.counts[~forward].sum(),
        traced.parameter_tensors if updates else 0,
    ]
    width = 0.5 if workload.precision is Precision.BF16 else 1.0
    each = width * BYTES_PER_PARAMETER[workload.optimizer]
    bytes_ = traced.parameters * each if updates else 0.0
    step = {
        "dispatches": np.array(dispatches, dtype=np.float64),
        "optimizer_bytes": float(bytes_),
        "copied_bytes": float(scope.copied_bytes * workload.batch_size),
        "waits_for_host": float(scope.waits_for_host),
    }
    return _streams(kernels, spec), _products(kernels, spec), step


def _joined(parts: Sequence[_Rows]) -> dict[str, Tensor]:
    """Concatenate all rows and add the index of the part of each row."""
    columns = {n: torch.from_numpy(np.concatenate([p[n] for p in parts])) for n in parts[0]}
    sizes = [len(part["count"]) for part in parts]
    return {**columns, "owner": torch.from_numpy(np.repeat(np.arange(len(parts)), sizes))}


def _streams(kernels: Kernels, spec: DeviceSpec) -> _Rows:
    table = kernels.table
    chosen = table.kinds >= PRODUCTS
    sizes = kernels.sizes[chosen]
    touched = np.maximum(sizes[:, : Size.WRITTEN_BYTES + 1].sum(axis=1), 1.0)
    ratio = np.log(touched / (spec.cache_mib * 2**20))
    place = np.interp(ratio, CACHE_KNOTS, np.arange(len(CACHE_KNOTS)))
    return {
        "count": table.counts[chosen].astype(np.float64),
        "kind": table.kinds[chosen].astype(np.int64) - PRODUCTS,
        "backward": (table.passes[chosen] != Pass.FORWARD).astype(np.int64),
        "half": table.half[chosen].astype(np.int64),
        "last": table.channels_last[chosen].astype(np.int64),
        "log_bytes": np.log(touched),
        "cache": np.maximum(1 - np.abs(place[:, None] - np.arange(len(CACHE_KNOTS))), 0),
        "columns": sizes[:, Size.COLUMNS],
    }


def _products(kernels: Kernels, spec: DeviceSpec) -> _Rows:
    table = kernels.table
    chosen = table.kinds < PRODUCTS
    sizes = np.maximum(kernels.sizes[chosen], 1.0)
    rows, columns, depth, products = sizes[:, Size.ROWS :].T
    kinds = table.kinds[chosen].astype(np.int64)
    passes = table.passes[chosen].astype(np.int64)
    windows = table.windows[chosen].astype(np.int64)
    strides = table.strides[chosen].astype(np.int64)
    pixels = table.pixels[chosen]
    convolution = kinds <= KernelKind.DEPTHWISE
    weight_gradient = passes == Pass.WEIGHT_GRADIENT
    fan_in = np.where(passes == Pass.FORWARD, depth, columns)
    fan_in = np.where(passes == Pass.DATA_GRADIENT, columns * windows, fan_in) / windows
    # A strided convolution's data gradient is shorter by about the square of the stride.
    fan_out = np.where(weight_gradient, rows, depth / windows * strides**2)
    fan_out = np.where(passes == Pass.FORWARD, columns, fan_out)
    half, last = table.half[chosen], table.channels_last[chosen]
    tiled = (kinds != KernelKind.DEPTHWISE) & (kinds != KernelKind.GROUPED)
    axes = np.stack(
        [
            np.where(convolution, pixels, rows),
            np.where(weight_gradient & convolution, fan_in, columns),
            np.where(convolution & ~weight_gradient, depth / windows, depth),
        ],
        axis=1,
    ).round()
    axes[convolution & weight_gradient, 2] = rows[convolution & weight_gradient]
    alignment = np.where(axes % 8 == 0, 0, np.where(axes % 2 == 0, 1, 2))
    alignment[~(half & tiled & (kinds != KernelKind.ATTENTION))] = 0
    tf32 = spec.uses_tf32(kinds, half)
    on_tensor_cores = half & (kinds != KernelKind.DEPTHWISE)
    detail = _FIRST_DETAIL[kinds] + _detail(kinds, windows, strides, fan_in, fan_out, products)
    behaves = np.where(_like_forward(kinds, passes, half), Pass.FORWARD, passes)
    return {
        "count": table.counts[chosen].astype(np.float64),
        "base": kinds * PASSES + passes,
        "like": kinds * PASSES + behaves,
        "detail": detail,
        "peak": np.select([on_tensor_cores, tf32], [Peak.HALF, Peak.TF32]),
        "last": last.astype(np.float64),
        "full": (~half & ~tf32).astype(np.float64),
        "winograd": (
            ~half & (kinds == KernelKind.DENSE) & (windows == 9) & (strides == 1) & ~tf32
        ).astype(np.float64),
        "reordered": (convolution & half & ~last).astype(np.float64),
        "log_flops": np.log(sizes[:, Size.FLOPS]),
        "log_bytes": np.log(sizes[:, : Size.WRITTEN_BYTES + 1].sum(axis=1)),
        "columns": columns,
        "depth": depth,
        "narrowest": np.minimum(columns, np.where(weight_gradient, rows, depth / windows)),
        "pixels": np.where(convolution, pixels, 1e6),
        "alignment": alignment.astype(np.int64),
        "tiles": _tiles(rows, columns, depth, products, spec.units) * tiled[:, None],
    }


def _like_forward(kinds: Indices, passes: Indices, half: BoolArray) -> BoolArray:
    """Return whether each kernel is an fp32 data gradient of a grouped or depthwise convolution.

    Such a gradient is as fast as the forward convolution. In 16 bits, libraries use kernels for it
    that are several times slower, as labels with autocast show.
    """
    grouped = (kinds == KernelKind.GROUPED) | (kinds == KernelKind.DEPTHWISE)
    chosen: BoolArray = grouped & (passes == Pass.DATA_GRADIENT) & ~half
    return chosen


def _detail(
    kinds: Indices,
    windows: Indices,
    strides: Indices,
    fan_in: Array,
    fan_out: Array,
    groups: Array,
) -> Indices:
    """Return the class of each kernel within its kind, counted from 0."""
    strided = (strides > 1).astype(np.int64)
    patch = (windows == strides**2) & (windows > 1)
    dense = np.select(
        [fan_in <= 4, patch, windows < 9, windows == 9, windows <= 25],
        [0, 1, 2, 3 + strided, 5],
        6,
    )
    direct = _direct(fan_in, fan_out, groups)
    grouped = np.where(
        direct, np.searchsorted([8], fan_in), 2 + np.searchsorted([8, 16, 32, 64], fan_in)
    )
    depthwise = 2 * np.searchsorted([9, 25, 49, 121], windows) + strided
    result: Indices = np.select(
        [
            kinds == KernelKind.POINTWISE,
            kinds == KernelKind.DENSE,
            kinds == KernelKind.GROUPED,
            kinds == KernelKind.DEPTHWISE,
        ],
        [strided, dense, grouped, depthwise],
        0,
    ).astype(np.int64)
    return result


def _direct(fan_in: Array, fan_out: Array, groups: Array) -> BoolArray:
    """Return whether the library has a dedicated kernel for each grouped convolution.

    Labels show that it needs equal numbers of input and output channels per group (4, 8, 16 or 32)
    and more than `FEW_GROUPS` groups. Other channels-last ones take two to four times as long.
    """
    same = np.abs(np.log(fan_out / fan_in)) < 0.2
    chosen: BoolArray = same & np.isin(fan_in.round(), (4, 8, 16, 32)) & (groups > FEW_GROUPS)
    return chosen


def _tiles(rows: Array, columns: Array, depth: Array, products: Array, units: int) -> Array:
    """Return the log ratio of work to useful work for each of `TILES` (P, tiles).

    Tiles at the edges and idle units in the last wave waste work. A library may also split a long
    depth among units.
    """
    result = []
    for height, width in TILES:
        best = np.full(len(rows), np.inf)
        for high, wide in {(height, width), (width, height)}:
            across, down = np.ceil(rows / high), np.ceil(columns / wide)
            padded = across * high * down * wide / (rows * columns)
            tiles = across * down * products
            wave = np.full(len(rows), np.inf)
            for split in _SPLITS:
                fits = (split == 1) | (depth / split >= _LEAST_DEPTH_OF_A_SPLIT)
                waves = np.ceil(tiles * split / units) * units / (tiles * split)
                wave = np.where(fits, np.minimum(wave, waves * (1 + 0.02 * (split > 1))), wave)
            best = np.minimum(best, padded * wave)
        result.append(np.log(best))
    return np.stack(result, axis=1)
