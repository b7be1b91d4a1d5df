"""Formula and constants of the step-time prior: the time of each kernel on a device.

kernel that multiplies     launch + (t_memory^p + t_math^p)^(1/p) + t_reorder
kernel bound by memory     launch + bytes / bandwidth * factor of its class
step                       (T_device^8 + T_host^8)^(1/8) + a constant
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from trappm.learner.physics.device_specs import DeviceSpec
from trappm.learner.physics.kernel_terms import (
    ALIGNED_AXES,
    CACHE_KNOTS,
    DETAIL_COUNT,
    PASSES,
    PRODUCTS,
    STREAMS,
    TILES,
    Peak,
    Products,
    Streams,
    Terms,
    terms_of,
)
from trappm.learner.workload import Workload
from trappm.profiler.records.kernels import KernelKind

STEP_MS = 0.1
"""Time of a step in addition to its kernels, before any label."""
LEAST_MS = 1e-9
"""Lower bound of device and host time, so that their logarithms exist."""
COPY_RATE = 5e6
"""Bytes per ms that a host copies from pageable memory, before any label; a round number."""
MOST_PENALTY = 5.0
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
    Group("stream", (STREAMS,), 0.0, 0.49),
    Group("stream_backward", (STREAMS,), 0.0, 0.21),
    Group("stream_half", (STREAMS,), 0.0, 0.28),
    Group("stream_last", (STREAMS,), 0.0, 0.28),
    Group("stream_columns", (STREAMS,), 1.5, 1),
    Group("cache", (len(CACHE_KNOTS) - 1,), (-0.8, -0.6, -0.3), 0.35),
    Group("optimizer", (), 0.3, 0.7),
    Group("slowdown", (PRODUCTS,), _SLOWDOWN, 0.49),
    Group("slowdown_pass", (PRODUCTS, PASSES), 0.0, 0.28),
    Group("slowdown_last", (PRODUCTS,), -0.1, 0.35),
    Group("slowdown_last_pass", (PRODUCTS, PASSES), 0.0, 0.28),
    Group("detail", (DETAIL_COUNT,), 0.0, 0.56),
    Group("detail_last", (DETAIL_COUNT,), 0.0, 0.42),
    Group("traffic", (PRODUCTS,), 0.0, 0.35),
    Group("traffic_pass", (PRODUCTS, PASSES), 0.0, 0.28),
    Group("traffic_last", (PRODUCTS, PASSES), 0.0, 0.35),
    Group("traffic_columns", (PRODUCTS, PASSES), 0.5, 0.7),
    Group("reorder", (PRODUCTS, PASSES), -1.0, 0.7),
    Group("columns", (PRODUCTS,), 2.5, 0.7),
    Group("columns_pass", (PRODUCTS, PASSES), 0.0, 0.49),
    Group("depth", (PRODUCTS,), 3.5, 0.7),
    Group("depth_pass", (PRODUCTS, PASSES), 0.0, 0.49),
    Group("pixels", (PRODUCTS, PASSES), 1.5, 0.84),
    Group("even", (PRODUCTS, ALIGNED_AXES), 0.1, 0.28),
    Group("odd", (PRODUCTS, ALIGNED_AXES), 0.2, 0.35),
    Group("traffic_even", (PRODUCTS, ALIGNED_AXES), 0.05, 0.21),
    Group("traffic_odd", (PRODUCTS, ALIGNED_AXES), 0.1, 0.28),
    Group("tile", (len(TILES),), (0.0, 0.15, 0.5), 0.21),
    Group("overlap", (), 0.3, 0.42),
    Group("tf32_peak", (), 0.0, 0.5, common=True),
    Group("host_copy", (), 0.0, 0.7, common=True),
    Group("slowdown_full", (PRODUCTS,), 0.0, 0.35),
    Group("slowdown_full_pass", (PRODUCTS, PASSES), 0.0, 0.28),
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


SHARE_GROUPS = (PRODUCTS * PASSES, STREAMS * 2, 1, DETAIL_COUNT, 4)
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
            self._by(products.owner, products.base, PRODUCTS * PASSES, self.products),
            self._by(streams.owner, streams.kind * 2 + streams.backward, STREAMS * 2, self.streams),
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
    both = torch.stack([device.clamp(min=LEAST_MS), host.clamp(min=LEAST_MS)]).log() * SHARPNESS
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
    math = terms.log_flops + peak + MOST_PENALTY * torch.tanh(penalty / MOST_PENALTY)
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
