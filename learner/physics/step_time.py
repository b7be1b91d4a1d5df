"""Prior of step times: the kernels of a step one by one, with constants of the device.

    kernel that multiplies     launch + (t_memory^p + t_math^p)^(1/p) + t_reorder
    kernel bound by memory     launch + bytes / bandwidth * factor of its class
    step                       (T_device^8 + T_host^8)^(1/8) + a constant

Four parts follow each other: kernels as arrays (`Terms`), in which nothing is fitted; the formula
with its constants (`Times`); the fit of the constants to labels (`DeviceFit`); and the prior.
The constants start from a specification sheet, so the prior predicts without labels. A new device
starts from another's constants: the share of the peak that a kernel reaches is similar, the peaks
are not. `research/priors` fits many devices together, from steps and single kernels.
docs/research/step_time.md has the reason for each term.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import IntEnum
from functools import cache
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trappm.learner.interface import Array, BoolArray, IntArray, Workload, cache_on_first
from trappm.learner.physics.prior import Prior
from trappm.learner.stats.folds import draw_rows
from trappm.profiler.devices.catalogue import DeviceSpec
from trappm.profiler.errors import InputError
from trappm.profiler.records import Phase, Precision
from trappm.profiler.traced_step import KernelKind, Kernels, KernelTable, Pass, Size

Indices = IntArray

PRODUCT_KINDS = 7
"""Number of kinds that multiply; the following kinds are bound by memory."""
STREAM_KINDS = len(KernelKind) - PRODUCT_KINDS
PASSES = len(Pass)

DETAILS_BY_KIND = {
    KernelKind.POINTWISE: 2,
    KernelKind.DENSE: 7,
    KernelKind.GROUPED: 7,
    KernelKind.DEPTHWISE: 10,
    KernelKind.LINEAR: 1,
    KernelKind.MATMUL: 1,
    KernelKind.ATTENTION: 1,
}
"""Number of details per kind: a library has different kernels for classes of shapes."""
_FIRST_DETAIL = np.cumsum([0, *DETAILS_BY_KIND.values()])
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

CUBES = (2, 3, 5)
"""Widths of windows of three dimensions."""

TILES = ((256, 128), (128, 64), (64, 32))
"""Rows and columns of the result that one unit computes at a time; a library chooses."""
_SPLITS = (1, 2, 4, 8, 16, 32, 64)
"""Parts that the depth of a product may be cut into (split-k)."""
_MIN_DEPTH_OF_A_SPLIT = 256
"""Least depth of a part. A round number: the limits of the libraries are not published."""

UNPACK_DISPATCHES = 6.0
"""Operators that take the host as long as an unpacking of weights in 4 bits, in addition to its
kernel (docs/research/step_time.md)."""


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
    """1 for arithmetic without tensor cores, such as fp32 without TF32."""
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
        streams=Streams(**_concatenate(streams)),
        products=Products(**_concatenate(products)),
        **{n: torch.from_numpy(np.array([step[n] for step in steps])) for n in steps[0]},
    )


_Rows = dict[str, npt.NDArray[Any]]


@cache_on_first
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
    launches = table.counts * (1 + UNPACK_DISPATCHES * _unpacks(table, workload))
    dispatches = [
        launches[forward].sum(),
        launches[~forward].sum(),
        traced.parameter_tensors if updates else 0,
    ]
    each = workload.optimizer.bytes_per_update(2 if workload.precision is Precision.BF16 else 4)
    bytes_ = traced.parameters * each if updates else 0.0
    step = {
        "dispatches": np.array(dispatches, dtype=np.float64),
        "optimizer_bytes": float(bytes_),
        "copied_bytes": float(scope.copied_bytes * workload.batch_size),
        "waits_for_host": float(scope.waits_for_host),
    }
    return _streams(kernels, spec), _products(kernels, spec, workload.precision), step


def _unpacks(table: KernelTable, workload: Workload) -> BoolArray:
    """Return whether each kernel unpacks weights in 4 bits, as bitsandbytes does (k).

    Such a kernel casts a buffer of the model to the type of the products.
    """
    casts: BoolArray = table.kinds == KernelKind.CAST
    allocations = None if workload.trace is None else workload.trace.allocations
    if allocations is None:
        return np.zeros_like(casts)
    read, written = (table.sizes[:, size] for size in (Size.READ_BYTES, Size.WRITTEN_BYTES))
    is_constant = (read[:, 1] == 0) & (written[:, 1] == 0)
    wider = 8 if workload.precision.is_fp32 else 4
    is_of_buffer = np.isin(read[:, 0], allocations.buffer_bytes) & (read[:, 0] > 0)
    chosen: BoolArray = casts & is_constant & is_of_buffer & (written[:, 0] == wider * read[:, 0])
    return chosen


def _concatenate(parts: Sequence[_Rows]) -> dict[str, Tensor]:
    """Concatenate all rows and add the index of the part of each row."""
    columns = {n: torch.from_numpy(np.concatenate([p[n] for p in parts])) for n in parts[0]}
    sizes = [len(part["count"]) for part in parts]
    return {**columns, "owner": torch.from_numpy(np.repeat(np.arange(len(parts)), sizes))}


def _streams(kernels: Kernels, spec: DeviceSpec) -> _Rows:
    table = kernels.table
    chosen = table.kinds >= PRODUCT_KINDS
    sizes = kernels.sizes[chosen]
    touched = np.maximum(sizes[:, : Size.WRITTEN_BYTES + 1].sum(axis=1), 1.0)
    ratio = np.log(touched / (spec.cache_mib * 2**20))
    place = np.interp(ratio, CACHE_KNOTS, np.arange(len(CACHE_KNOTS)))
    return {
        "count": table.counts[chosen].astype(np.float64),
        "kind": table.kinds[chosen].astype(np.int64) - PRODUCT_KINDS,
        "backward": (table.passes[chosen] != Pass.FORWARD).astype(np.int64),
        "half": table.half[chosen].astype(np.int64),
        "last": table.channels_last[chosen].astype(np.int64),
        "log_bytes": np.log(touched),
        "cache": np.maximum(1 - np.abs(place[:, None] - np.arange(len(CACHE_KNOTS))), 0),
        "columns": sizes[:, Size.COLUMNS],
    }


def _products(kernels: Kernels, spec: DeviceSpec, precision: Precision) -> _Rows:
    table = kernels.table
    chosen = table.kinds < PRODUCT_KINDS
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
    tf32 = spec.uses_tf32(kinds, half, precision)
    on_tensor_cores = half & spec.has_tensor_cores
    full = ~on_tensor_cores & ~tf32
    alignment[~(on_tensor_cores & tiled & (kinds != KernelKind.ATTENTION))] = 0
    detail = _FIRST_DETAIL[kinds] + _detail(kinds, windows, strides, fan_in, fan_out, products)
    behaves = np.where(_like_forward(kinds, passes, half), Pass.FORWARD, passes)
    return {
        "count": table.counts[chosen].astype(np.float64),
        "base": kinds * PASSES + passes,
        "like": kinds * PASSES + behaves,
        "detail": detail,
        "peak": np.select([half & (kinds != KernelKind.DEPTHWISE), tf32], [Peak.HALF, Peak.TF32]),
        "last": last.astype(np.float64),
        "full": full.astype(np.float64),
        "winograd": (
            ~half & (kinds == KernelKind.DENSE) & (windows == 9) & (strides == 1) & ~tf32
        ).astype(np.float64),
        "reordered": (convolution & on_tensor_cores & ~last).astype(np.float64),
        "log_flops": np.log(sizes[:, Size.FLOPS]),
        "log_bytes": np.log(sizes[:, : Size.WRITTEN_BYTES + 1].sum(axis=1)),
        "columns": columns,
        "depth": depth,
        "narrowest": np.minimum(columns, np.where(weight_gradient, rows, depth / windows)),
        "pixels": np.where(convolution, pixels, 1e6),
        "alignment": alignment.astype(np.int64),
        "tiles": _tiles(rows, columns, depth, products, spec.units, full & ~convolution)
        * tiled[:, None],
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
    """Return the class of each kernel within its kind, counted from 0.

    A window of three dimensions has the class of the square window of its width.
    """
    windows = np.select(
        [windows == size**3 for size in CUBES], [size**2 for size in CUBES], windows
    )
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


def _tiles(
    rows: Array, columns: Array, depth: Array, products: Array, units: int, overlapping: BoolArray
) -> Array:
    """Return the log ratio of work to useful work for each of `TILES` (P, tiles).

    Tiles at the edges and idle units in the last wave waste work. A library may also split a long
    depth among units. Without tensor cores, a unit has several tiles of a product at a time
    (`overlapping`), so that waves overlap and units are idle only if there are fewer tiles than
    units (docs/research/step_time.md).
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
                fits = (split == 1) | (depth / split >= _MIN_DEPTH_OF_A_SPLIT)
                waves = tiles * split / units
                ends = np.where(overlapping, np.maximum(waves, 1.0), np.ceil(waves))
                waste = ends / waves * (1 + 0.02 * (split > 1))
                wave = np.where(fits, np.minimum(wave, waste), wave)
            best = np.minimum(best, padded * wave)
        result.append(np.log(best))
    return np.stack(result, axis=1)


STEP_MS = 0.1
"""Time of a step in addition to its kernels, before any label."""
MIN_MS = 1e-9
"""Lower bound of device and host time, so that their logarithms exist."""
COPY_RATE = 5e6
"""Bytes per ms that a host copies from pageable memory, before any label; a round number."""
MAX_PENALTY = 5.0
"""Bound of the logarithm of a slowdown caused by a kernel's shape: a factor of 150.
A round number that only implausible constants approach."""
BOUND = 6.0
"""Sharpness of the bend where a kernel reaches the peak of the device; a round number."""
SHARPNESS = 8.0
"""Power of the smooth minimum over tiles and the smooth maximum of device and host time
(docs/research/step_time.md). Large enough for a maximum, with a slope on both sides."""

CHUNK = 500
"""Largest number of workloads whose derivatives are computed at once."""


@dataclass(frozen=True)
class Group:
    """Constants of the same meaning, with their Gaussian prior."""

    name: str
    shape: tuple[int, ...]
    centre: tuple[float, ...] | float
    """Prior mean of the logarithm: one value, or one per entry of the first axis."""
    spread: float
    common: bool = False
    """True if the constant belongs to the device, not to its software: `tightness` is ignored."""


# Rough values from literature and data sheets.
# Spreads were chosen with the formula, on folds of all published rows
# (docs/research/step_time.md).
_SLOWDOWN = (0.6, 0.5, 2.0, 1.8, 0.4, 0.8, 0.8)
GROUPS = (
    Group("peak", (2,), 0.0, 0.5, common=True),
    Group("bandwidth", (), 0.1, 0.5, common=True),
    # 3 and 6 us, timed on an H100 (docs/research/step_time.md); launches hardly differ by card.
    Group("launch", (3,), (0.4, 1.1, 0.5), 0.2, common=True),
    # 27 us: a fit that starts below the time of the device does not see that the host is slower.
    Group("dispatch", (3,), (1.2, 1.2, 0.7), 0.7, common=True),
    Group("step", (), 0.0, 1.0, common=True),
    Group("stream", (STREAM_KINDS,), 0.0, 0.49),
    Group("stream_backward", (STREAM_KINDS,), 0.0, 0.21),
    Group("stream_half", (STREAM_KINDS,), 0.0, 0.28),
    Group("stream_last", (STREAM_KINDS,), 0.0, 0.28),
    Group("stream_columns", (STREAM_KINDS,), 1.5, 1),
    Group("cache", (len(CACHE_KNOTS) - 1,), (-0.8, -0.6, -0.3), 0.35),
    Group("optimizer", (), 0.3, 0.7),
    Group("slowdown", (PRODUCT_KINDS,), _SLOWDOWN, 0.49),
    Group("slowdown_pass", (PRODUCT_KINDS, PASSES), 0.0, 0.28),
    Group("slowdown_last", (PRODUCT_KINDS,), -0.1, 0.35),
    Group("slowdown_last_pass", (PRODUCT_KINDS, PASSES), 0.0, 0.28),
    Group("detail", (DETAIL_COUNT,), 0.0, 0.56),
    Group("detail_last", (DETAIL_COUNT,), 0.0, 0.42),
    Group("traffic", (PRODUCT_KINDS,), 0.0, 0.35),
    Group("traffic_pass", (PRODUCT_KINDS, PASSES), 0.0, 0.28),
    Group("traffic_last", (PRODUCT_KINDS, PASSES), 0.0, 0.35),
    Group("traffic_columns", (PRODUCT_KINDS, PASSES), 0.5, 0.7),
    Group("reorder", (PRODUCT_KINDS, PASSES), -1.0, 0.7),
    Group("columns", (PRODUCT_KINDS,), 2.5, 0.7),
    Group("columns_pass", (PRODUCT_KINDS, PASSES), 0.0, 0.49),
    Group("depth", (PRODUCT_KINDS,), 3.5, 0.7),
    Group("depth_pass", (PRODUCT_KINDS, PASSES), 0.0, 0.49),
    Group("pixels", (PRODUCT_KINDS, PASSES), 1.5, 0.84),
    Group("even", (PRODUCT_KINDS, ALIGNED_AXES), 0.1, 0.28),
    Group("odd", (PRODUCT_KINDS, ALIGNED_AXES), 0.2, 0.35),
    Group("traffic_even", (PRODUCT_KINDS, ALIGNED_AXES), 0.05, 0.21),
    Group("traffic_odd", (PRODUCT_KINDS, ALIGNED_AXES), 0.1, 0.28),
    Group("tile", (len(TILES),), (0.0, 0.15, 0.5), 0.21),
    Group("overlap", (), 0.3, 0.42),
    Group("tf32_peak", (), 0.0, 0.5, common=True),
    Group("host_copy", (), 0.0, 0.7, common=True),
    Group("slowdown_full", (PRODUCT_KINDS,), 0.0, 0.35),
    Group("slowdown_full_pass", (PRODUCT_KINDS, PASSES), 0.0, 0.28),
    Group("detail_full", (DETAIL_COUNT,), 0.0, 0.42),
    Group("winograd", (PASSES,), 0.0, 0.35),
)
"""Logarithms of a time or a slowdown relative to the specification, or (columns, depth) of the size
at which a product reaches half of its speed."""


@cache
def starting_constants() -> Tensor:
    """Return the prior means of all constants (c)."""
    parts = []
    for group in GROUPS:
        centre = torch.tensor(group.centre, dtype=torch.float64)
        while centre.dim() < len(group.shape):
            centre = centre[..., None]
        parts.append(centre.expand(group.shape).flatten())
    return torch.cat(parts)


def spreads(tightness: float) -> Tensor:
    """Return the prior deviation of each constant (c), reduced for a well-known start."""
    parts = [
        torch.full(group.shape, group.spread * (1.0 if group.common else tightness)).flatten()
        for group in GROUPS
    ]
    return torch.cat(parts).double()


_SIZES = [int(np.prod(group.shape)) for group in GROUPS]
_OFFSETS = dict(zip((g.name for g in GROUPS), np.cumsum([0, *_SIZES[:-1]]).tolist(), strict=True))
"""Index of the first constant of each group."""


def group_rows() -> list[tuple[Group, slice]]:
    """Return each group and the slice of its constants."""
    starts = _OFFSETS.values()
    return [
        (group, slice(start, start + size))
        for group, start, size in zip(GROUPS, starts, _SIZES, strict=True)
    ]


SHARE_GROUPS = (PRODUCT_KINDS * PASSES, STREAM_KINDS * 2, 1, DETAIL_COUNT, 4)
"""Columns of `Times.shares`. The squares of the first three groups sum to 1; the last are sizes."""


@dataclass(frozen=True, eq=False)
class Times:
    """Times in ms of n workloads with P kernels that multiply and S that do not."""

    products: Tensor
    """Time of all runs of each kernel (P)."""
    streams: Tensor
    """Time of all runs of each kernel (S)."""
    optimizer: Tensor
    """Time of the optimizer (n); the following fields have the same shape."""
    updating: Tensor
    """Part of the optimizer's time that reads and writes; launches are the rest."""
    host: Tensor
    host_optimizer: Tensor
    """Part of the host's time that launches the optimizer's kernels."""
    device: Tensor
    step: Tensor

    def total(self) -> Tensor:
        return _longer_of(self.device, self.host) + self.step

    def passes(self) -> Tensor:
        """Return the time of forward and backward pass, which accumulation repeats (n)."""
        return _longer_of(self.device - self.optimizer, self.host - self.host_optimizer)

    def shares(self, terms: Terms) -> Tensor:
        """Return features of n workloads: square roots of shares of the device's time, and sizes.

        Square roots tell workloads apart by rare kernels, too. In folds of architectures of the
        three RTX sheets they were better than shares (docs/research/step_time.md).
        """
        products, streams = terms.products, terms.streams
        parts = [
            self._by(products.owner, products.base, PRODUCT_KINDS * PASSES, self.products),
            self._by(
                streams.owner, streams.kind * 2 + streams.backward, STREAM_KINDS * 2, self.streams
            ),
            self.optimizer[:, None],
            self._by(products.owner, products.detail, DETAIL_COUNT, self.products),
        ]
        shares = (torch.cat(parts, dim=1) / self.device[:, None]).sqrt()
        sizes = [self.device, self.host, terms.dispatches.sum(1), terms.optimizer_bytes + 1e6]
        return torch.cat([shares, torch.stack(sizes, dim=1).log()], dim=1)

    def _by(self, owner: Tensor, kind: Tensor, kinds: int, times: Tensor) -> Tensor:
        """Return the sums by workload and kind (n, kinds)."""
        sums = torch.zeros(len(self.host) * kinds, dtype=torch.float64)
        return sums.index_add(0, owner * kinds + kind, times).reshape(-1, kinds)


def _longer_of(device: Tensor, host: Tensor) -> Tensor:
    """Return a smooth maximum of the times of device and host."""
    both = torch.stack([device.clamp(min=MIN_MS), host.clamp(min=MIN_MS)]).log() * SHARPNESS
    return (both.logsumexp(0) / SHARPNESS).exp()


class Lookup:
    """Constants by name, picked for each kernel, and their derivatives.

    A kernel's time depends on what was picked for that kernel only. So one backward pass of the
    sum of all times has the derivative of each time by each constant: the whole Jacobian.
    """

    def __init__(self, constants: Tensor, tracked: bool = False) -> None:
        parts: Sequence[Tensor] = torch.split(constants, _SIZES)
        self._parts = dict(zip(_OFFSETS, parts, strict=True))
        self._tracked = tracked
        self._picked: list[tuple[Tensor, int, Tensor, Tensor]] = []

    def pick(self, name: str, index: Tensor, owner: Tensor) -> Tensor:
        """Return constants of a group (k).

        Args:
            name: Name of the group.
            index: Positions in the flattened group (k).
            owner: Workload of each position (k).
        """
        values = self._parts[name].index_select(0, index)
        if self._tracked:
            values.requires_grad_()
            self._picked.append((values, _OFFSETS[name], index, owner))
        return values

    def jacobian(self, values: Tensor) -> Tensor:
        """Return the derivatives of one value per workload by all constants (n, c)."""
        width = sum(_SIZES)
        gradients = torch.autograd.grad(values.sum(), [picked[0] for picked in self._picked])
        flat = torch.zeros(len(values) * width, dtype=torch.float64)
        places: dict[tuple[int, int], Tensor] = {}  # many names are picked at the same ones
        for gradient, (_, first, index, owner) in zip(gradients, self._picked, strict=True):
            key = id(index), id(owner)
            if key not in places:
                places[key] = owner * width + index
            flat[first:].index_add_(0, places[key], gradient)
        return flat.reshape(-1, width)


def times_of(terms: Terms, lookup: Lookup, spec: DeviceSpec) -> Times:
    products = _product_times(terms.products, lookup, spec)
    streams = _stream_times(terms.streams, lookup, spec)
    workloads = torch.arange(len(terms.dispatches))
    zeros = torch.zeros_like(workloads)

    def pick(name: str, at: int = 0) -> Tensor:
        return lookup.pick(name, zeros + at, workloads)

    per_byte = pick("optimizer") + pick("bandwidth") - np.log(spec.bandwidth_gbs * 1e6)
    updating = terms.optimizer_bytes * per_byte.exp()
    optimizer = updating + terms.dispatches[:, 2] * _launch(pick("launch", 2), spec)
    device = optimizer.index_add(0, terms.products.owner, products)
    device = device.index_add(0, terms.streams.owner, streams)
    per_launch = torch.stack([pick("dispatch", at) for at in range(3)], dim=1).exp()
    each = terms.dispatches * per_launch * (terms.waits_for_host * spec.dispatch_us / 1e3)[:, None]
    return Times(
        products=products,
        streams=streams,
        optimizer=optimizer,
        updating=updating,
        host=each.sum(1),
        host_optimizer=each[:, 2],
        device=device,
        step=pick("step").exp() * STEP_MS
        + pick("host_copy").exp() * terms.copied_bytes / COPY_RATE,
    )


def _launch(constant: Tensor, spec: DeviceSpec) -> Tensor:
    return constant.exp() * (spec.launch_us / 1e3)


def _product_times(terms: Products, lookup: Lookup, spec: DeviceSpec) -> Tensor:
    """Return the time of each kernel that multiplies, in ms (P)."""
    zeros = torch.zeros_like(terms.base)

    def pick(name: str, index: Tensor = terms.base) -> Tensor:
        return lookup.pick(name, index, terms.owner)

    tf32_tflops = spec.tf32_tflops or spec.full_tflops
    tflops = [spec.full_tflops, spec.half_tflops, tf32_tflops]
    peaks = torch.tensor(tflops, dtype=torch.float64)[terms.peak]
    peaks[terms.base // PASSES == KernelKind.DEPTHWISE] = spec.lanes_tflops
    slower = torch.where(
        terms.peak == Peak.TF32,
        pick("tf32_peak", zeros),
        pick("peak", (terms.peak == Peak.HALF).long()),
    )
    peak = slower - (peaks * 1e9).log()
    bandwidth = pick("bandwidth", zeros) - np.log(spec.bandwidth_gbs * 1e6)
    penalty, traffic = _product_penalties(terms, lookup)
    math = terms.log_flops + peak + MAX_PENALTY * torch.tanh(penalty / MAX_PENALTY)
    memory = terms.log_bytes + bandwidth + traffic
    power = 1 + pick("overlap", zeros).exp()
    product = (torch.logaddexp(power * math, power * memory) / power).exp()
    reorder = terms.reordered * (terms.log_bytes + pick("reorder") + bandwidth).exp()
    each: Tensor = product + reorder + _launch(pick("launch", zeros), spec)
    return terms.count * each


def _product_penalties(terms: Products, lookup: Lookup) -> tuple[Tensor, Tensor]:
    """Return the log slowdowns against the peaks of arithmetic and of memory (P each)."""
    zeros = torch.zeros_like(terms.base)
    kinds = terms.base // PASSES

    def pick(name: str, index: Tensor = terms.like) -> Tensor:
        return lookup.pick(name, index, terms.owner)

    def narrow(constant: Tensor, size: Tensor) -> Tensor:
        """Return the log slowdown of a small size: log 2 where size and constant are equal."""
        return torch.log1p(constant.exp() / size)

    axes = [kinds * ALIGNED_AXES + axis for axis in range(ALIGNED_AXES)]
    some, more = ((least < terms.alignment.T).double() for least in (0, 1))

    def misaligned(even: str, odd: str) -> Tensor:
        slower = torch.zeros_like(terms.log_bytes)
        for axis, place in enumerate(axes):
            slower = slower + some[axis] * pick(even, place) + more[axis] * pick(odd, place)
        return slower

    tile = torch.stack([pick("tile", zeros + i) for i in range(len(TILES))])
    penalty = (
        pick("slowdown", kinds)
        + pick("slowdown_pass")
        + terms.last * (pick("slowdown_last", kinds) + pick("slowdown_last_pass"))
        + pick("detail", terms.detail)
        + terms.full * (pick("slowdown_full", kinds) + pick("slowdown_full_pass", terms.base))
        + terms.full * pick("detail_full", terms.detail)
        + terms.last * pick("detail_last", terms.detail)
        + narrow(pick("columns", kinds) + pick("columns_pass"), terms.columns)
        + narrow(pick("depth", kinds) + pick("depth_pass"), terms.depth)
        + narrow(pick("pixels"), terms.pixels)
        - torch.logsumexp(-SHARPNESS * (terms.tiles.T + tile), dim=0) / SHARPNESS
        + misaligned("even", "odd")
    )
    traffic = _slower(
        pick("traffic", kinds)
        + pick("traffic_pass")
        + terms.last * pick("traffic_last")
        + narrow(pick("traffic_columns"), terms.narrowest)
        + misaligned("traffic_even", "traffic_odd")
    )
    faster = terms.winograd * pick("winograd", terms.base % PASSES)
    return _slower(penalty) - faster, traffic


def _slower(penalty: Tensor) -> Tensor:
    """Return the penalty, bounded softly at 0: no kernel is faster than the device's peak."""
    return torch.nn.functional.softplus(penalty, beta=BOUND)


def _stream_times(terms: Streams, lookup: Lookup, spec: DeviceSpec) -> Tensor:
    zeros = torch.zeros_like(terms.kind)

    def pick(name: str, index: Tensor = terms.kind) -> Tensor:
        return lookup.pick(name, index, terms.owner)

    slower = (
        pick("stream")
        + terms.backward * pick("stream_backward")
        + terms.half * pick("stream_half")
        + terms.last * pick("stream_last")
    )
    narrow = torch.log1p(pick("stream_columns").exp() / terms.columns.clamp(min=1))
    slower = _slower(slower + narrow * (terms.columns > 0))
    for knot in range(len(CACHE_KNOTS) - 1):
        slower = slower + terms.cache[:, knot] * pick("cache", zeros + knot)
    bandwidth = pick("bandwidth", zeros) - np.log(spec.bandwidth_gbs * 1e6)
    moving = (terms.log_bytes + bandwidth + slower).exp()
    each: Tensor = moving + _launch(pick("launch", zeros + 1), spec)
    return terms.count * each


def chunks_of(workloads: Sequence[Workload], spec: DeviceSpec) -> list[Terms]:
    """Return the terms of workloads, at most `CHUNK` of them at a time."""
    starts = range(0, len(workloads), CHUNK)
    return [terms_of(workloads[start : start + CHUNK], spec) for start in starts]


def log_times(chunks: Iterable[Terms], constants: Tensor, spec: DeviceSpec) -> Tensor:
    """Return the logarithms of step times in ms (n)."""
    with torch.no_grad():
        times = [times_of(terms, Lookup(constants), spec).total() for terms in chunks]
    return torch.cat(times).log()


def linear(chunks: Iterable[Terms], constants: Tensor, spec: DeviceSpec) -> tuple[Tensor, Tensor]:
    """Return logarithms of step times (n) and their derivatives by the constants (n, c)."""
    values, jacobians = [], []
    for terms in chunks:
        lookup = Lookup(constants, tracked=True)
        logs = times_of(terms, lookup, spec).total().log()
        jacobians.append(lookup.jacobian(logs))
        values.append(logs.detach())
    return torch.cat(values), torch.cat(jacobians)


# Round numbers, unless a source is named.
NOISE_DEGREES = 3.0
"""Degrees of freedom of the Student-t error."""
MIN_NOISE = 0.02
"""Least noise of the logarithm, below the error of docs/research/step_time.md alone."""
FEW = 10.0
"""Number of labels that a fit can meet by chance, which raises the least noise."""
ITERATIONS = 40
CALM_STEPS, MIN_GAIN = 2, 5e-3
"""Steps in a row that end a fit, and the gain that they stay below: nats times the root of the
number of labels."""
MAX_DAMPING = 1e8
"""Damping at which a fit ends without another step."""
ROUNDS = 3
"""Fits, each with spreads learned from the one before."""
PSEUDO_CONSTANTS = 6.0
"""Weight of the first spread, as a number of learned constants."""
CHANGES = (0.1, 3.0)
"""Bounds of a learned spread relative to the first."""


def spread_factor(moved: float, determined: float, smallest: float, largest: float) -> float:
    """Return the factor on a group's first spread by evidence maximization.

    A group's variance is the sum of its squared shifts over its degrees of freedom, the number of
    constants that labels determined (MacKay 1992, "Bayesian interpolation").

    Args:
        moved: Sum of the squared shifts, in first spreads.
        determined: Degrees of freedom.
        smallest, largest: Bounds of the factor.
    """
    variance = (PSEUDO_CONSTANTS + moved) / (PSEUDO_CONSTANTS + determined)
    return float(min(max(variance**0.5, smallest), largest))


def student_loss(errors: Tensor, scale: Tensor | float) -> float:
    """Return twice the negative log density of Student-t errors, up to a constant."""
    tails = torch.log1p(errors**2 / (NOISE_DEGREES * scale**2))
    return float((NOISE_DEGREES + 1) * tails.sum())


def noise_scale(errors: Tensor, before: float) -> float:
    """Return the noise scale of some labels: their median error, never rising."""
    smallest = MIN_NOISE * (1 + FEW / len(errors))
    return max(smallest, min(before, 1.48 * float(errors.abs().median())))


def normal_variances(errors: Tensor, scales: Tensor | float) -> Tensor:
    """Return variances of normal errors that act like Student-t ones (n)."""
    return (NOISE_DEGREES * scales**2 + errors**2) / (NOISE_DEGREES + 1)


class DeviceFit:
    """The most probable constants of one device.

    Attributes:
        spreads: Spread of each constant, learned or as given (c).
    """

    def __init__(
        self,
        chunks: Sequence[Terms],
        log_values: Array,
        spec: DeviceSpec,
        *,
        centre: Tensor,
        spreads: Tensor,
        learns: bool,
    ) -> None:
        """Fit the constants.

        Args:
            chunks: Terms of the labelled steps, a few at a time.
            log_values: Logarithms of their times in ms (n).
            spec: Specification of the device.
            centre: Center of the constants' prior (c).
            spreads: Deviations of the constants' prior (c), all positive.
            learns: Whether to learn the spread of each group of constants, too.
        """
        self.spreads = spreads
        self._chunks, self._spec, self._centre = chunks, spec, centre
        self._labels = torch.from_numpy(np.asarray(log_values, dtype=np.float64))
        self._shift = torch.zeros_like(spreads)  # in units of the spreads
        self._noise = 0.5
        for _ in range(ROUNDS - 1 if learns else 0):
            self._fit()
            self._learn_spreads(spreads)
        self._fit()

    @property
    def constants(self) -> Tensor:
        """The constants (c)."""
        return self._centre + self.spreads * self._shift

    def _linear(self) -> tuple[Tensor, Tensor]:
        """Return errors (n) and derivatives of the predictions by the shifts (n, c)."""
        values, jacobian = linear(self._chunks, self.constants, self._spec)
        return self._labels - values, jacobian * self.spreads

    def _loss(self, errors: Tensor) -> float:
        """Return twice the negative log posterior at this noise, up to a constant."""
        return student_loss(errors, self._noise) + float((self._shift**2).sum())

    def _fit(self) -> None:
        """Take damped Gauss-Newton steps on reweighted squares.

        `scipy.optimize.least_squares`, and so `map_fit`, decomposes labels + constants times
        constants at each step. For 120 kernels of one device it had not ended after 20 s of CPU
        time; this takes 0.2 s.
        """
        errors, slopes = self._linear()
        damping, calm = 0.1, 0
        for _ in range(ITERATIONS):
            self._noise = noise_scale(errors, self._noise)
            variances = normal_variances(errors, self._noise)
            loss, before = self._loss(errors), self._shift
            gain = -1.0
            while not gain >= 0 and damping < MAX_DAMPING:  # also where it is not a number
                self._shift = self._find_shift(errors, slopes, variances, 1 + damping, before)
                values = log_times(self._chunks, self.constants, self._spec)
                gain = loss - self._loss(self._labels - values)
                damping = damping * 4 if not gain >= 0 else max(damping / 4, 1e-4)
            if not gain >= 0:
                self._shift = before
                return
            calm = calm + 1 if gain < MIN_GAIN * len(self._labels) ** 0.5 else 0
            if calm == CALM_STEPS:
                return
            errors, slopes = self._linear()

    def _find_shift(
        self, errors: Tensor, slopes: Tensor, variances: Tensor, weight: float, shift: Tensor
    ) -> Tensor:
        """Return the shift after a step from `shift`, with this weight on zero.

        The system has the size of the labels (Woodbury's identity), or of the constants if those
        are fewer.
        """
        if len(errors) > len(shift):
            precision = slopes.T @ (slopes / variances[:, None])
            precision.diagonal().add_(weight)
            slope = slopes.T @ (errors / variances) - shift
            step: Tensor = torch.linalg.solve(precision, slope)
            return shift + step
        covariance = torch.diag(weight * variances) + slopes @ slopes.T
        solved: Tensor = torch.linalg.solve(covariance, errors + slopes @ shift / weight)
        return shift + slopes.T @ solved - shift / weight

    def _posterior_variances(self) -> Tensor:
        """Return the posterior variance of the shifts (c)."""
        errors, slopes = self._linear()
        self._noise = noise_scale(errors, self._noise)
        variances = normal_variances(errors, self._noise)
        if len(errors) > len(self._shift):
            precision = slopes.T @ (slopes / variances[:, None])
            precision.diagonal().add_(1.0)
            posterior: Tensor = torch.linalg.inv(precision).diagonal()
            return posterior
        inverse: Tensor = torch.linalg.inv(torch.diag(variances) + slopes @ slopes.T)
        return 1.0 - (slopes * (inverse @ slopes)).sum(0)

    def _learn_spreads(self, first: Tensor) -> None:
        """Learn the spread of each group of constants from the first ones (`spread_factor`).

        One device says nothing about the spread of a group of one common constant.
        """
        posterior, learned = self._posterior_variances(), first.clone()
        for group, rows in group_rows():
            if not group.common:
                scale = self.spreads[rows] / first[rows]
                moved = float(((self._shift[rows] * scale) ** 2).sum())
                determined = float((1.0 - posterior[rows]).sum())
                learned[rows] *= spread_factor(moved, determined, *CHANGES)
        self._shift, self.spreads = self._shift * self.spreads / learned, learned


# The form of the fit was chosen on folds of all published rows of step times
# (docs/research/step_time.md). Round numbers.
MANY_LABELS = 300
"""Number of labels from which spreads are not learned again without a fold: with fewer, errors on
the fold would look too small."""
MAX_LABELS = 1500
"""Largest number of labels for the constants; more only help the residual."""


class StepTimePrior(Prior):
    """Simulated time of a step in ms."""

    def __init__(
        self,
        spec: DeviceSpec,
        constants: Tensor | None = None,
        learned_spreads: Tensor | None = None,
        between: Tensor | None = None,
    ) -> None:
        """Set up the prior; `tensors` stores spec and constants only.

        Args:
            spec: Specification of the device.
            constants: Constants (c; default: those without labels).
            learned_spreads: Spreads of the constants that labels taught (c).
            between: Spreads of the constants between devices (c), if they are another device's.
        """
        self.spec = spec
        self.constants = starting_constants() if constants is None else constants
        self.learned_spreads = learned_spreads
        self.between = between

    def started_from(self, other: Self) -> Self:
        """Return this device with the constants of another, relative to its specification."""
        return type(self)(self.spec, other.constants, between=self.between)

    @property
    def feature_groups(self) -> tuple[int, ...]:
        return SHARE_GROUPS

    def log_values(self, workloads: Sequence[Workload]) -> Array:
        if not len(workloads):
            return np.zeros(0)
        values: Array = log_times(
            chunks_of(workloads, self.spec), self.constants, self.spec
        ).numpy()
        return values

    def logs_and_features(self, workloads: Sequence[Workload]) -> tuple[Array, Array]:
        if not len(workloads):
            return np.zeros(0), np.zeros((0, sum(self.feature_groups)))
        with torch.no_grad():
            chunks = [
                (times.total().log(), times.shares(terms))
                for terms in chunks_of(workloads, self.spec)
                for times in [times_of(terms, Lookup(self.constants), self.spec)]
            ]
        logs, features = (torch.cat(parts).numpy() for parts in zip(*chunks, strict=True))
        return logs, features

    def refit(
        self,
        workloads: Sequence[Workload],
        log_values: Array,
        *,
        log_above: Array | None = None,
        tightness: float = 1.0,
        near: Self | None = None,
    ) -> Self:
        """Return the most probable constants: Student-t errors of the logarithm, Gaussian priors.

        With fewer than `MANY_LABELS`, constants of another device move as far as devices differ.
        Otherwise the spread of each group is learned, too; with `MANY_LABELS` it is that of `near`.
        Lower bounds (`log_above`) hardly constrain a time and are unused.
        """
        known = np.flatnonzero(np.isfinite(log_values))
        if not len(known):
            return self
        is_few = len(known) < MANY_LABELS
        if len(known) > MAX_LABELS:
            known = known[draw_rows(len(known), MAX_LABELS)]
        learned = near.learned_spreads if near is not None and not is_few else None
        given = self.between if is_few else learned
        fit = DeviceFit(
            chunks_of([workloads[i] for i in known.tolist()], self.spec),
            log_values[known],
            self.spec,
            centre=self.constants,
            spreads=spreads(tightness) if given is None else given,
            learns=given is None,
        )
        if is_few and self.between is not None:
            return type(self)(self.spec, fit.constants, between=self.between)
        return type(self)(self.spec, fit.constants, fit.spreads)

    def pass_share(self, workloads: Sequence[Workload]) -> Array:
        """Return the share of a training step that its forward and backward pass take (n).

        What a step waits for once is not repeated, either.
        """
        with torch.no_grad():
            chunks = chunks_of(workloads, self.spec)
            times = [times_of(terms, Lookup(self.constants), self.spec) for terms in chunks]
            shares = [each.passes() / each.total() for each in times]
        values: Array = torch.cat(shares).numpy()
        return values

    def sensitivities(self, workloads: Sequence[Workload]) -> Array:
        if not len(workloads):
            return np.zeros((0, len(self.constants)))
        _, jacobian = linear(chunks_of(workloads, self.spec), self.constants, self.spec)
        deviations = spreads(1.0) if self.between is None else self.between
        values: Array = (jacobian * deviations).numpy()
        return values

    def tensors(self) -> dict[str, Tensor]:
        numbers = [0.0 if value is None else value for value in asdict(self.spec).values()]
        spec = torch.tensor(numbers, dtype=torch.float64)
        return {"constants": self.constants.clone(), "spec": spec}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Self:
        constants, spec = tensors["constants"], tensors["spec"].tolist()
        if constants.shape != starting_constants().shape or len(spec) != len(fields(DeviceSpec)):
            raise ValueError(
                f"{tuple(constants.shape)} constants and {len(spec)} numbers of a spec"
            )
        *others, tf32 = spec
        if not constants.isfinite().all() or min(others) <= 0 or not tf32 >= 0:
            raise ValueError("constants that are not finite, or a spec that is not positive")
        read = DeviceSpec(*others)
        read = replace(read, units=round(read.units), tf32_tflops=tf32 or None)
        return cls(read, constants.double())
