"""The physical prior of a step's time: kernels one by one, with constants of the device.

    kernel that multiplies     launch + (t_memory^p + t_math^p)^(1/p) + t_reorder
    kernel bound by memory     launch + bytes / bandwidth * factor of its class
    step                       (T_device^8 + T_host^8)^(1/8) + a constant

The constants start from a specification sheet, so the prior says something without any label;
labels move them, each as far as its own prior lets it. A new device starts from another one's:
what a kernel reaches of the peak is much the same on both, the peaks are not. docs/step_time.md has
each term's reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Self

import numpy as np
import torch
from torch import Tensor

from learner.device_specs import UNKNOWN_GPU, DeviceSpec
from learner.kernel_terms import (
    ALIGNED_AXES,
    CACHE_KNOTS,
    DETAIL_COUNT,
    PASSES,
    PRODUCTS,
    STREAMS,
    TILES,
    Array,
    Products,
    Streams,
    Terms,
    terms_of,
)
from learner.workload import Workload
from profiler.errors import InputError

NOISE_DEGREES = 3.0
"""Of freedom of the Student-t error: some models surprise everybody."""
LEAST_NOISE = 0.02
ITERATIONS = 40
STEP_MS = 0.1
"""What a step costs beside its kernels, before labels say better."""
CHUNK = 500
"""So many workloads at a time: the derivatives of all kernels take memory."""
MOST_PENALTY = 5.0
"""Bound of the logarithm of how much slower than its peak a kernel may be for its shape."""
SHARPNESS = 8.0
"""Of the choice among tiles, and of the larger of device's and host's time."""


@dataclass(frozen=True)
class _Group:
    """Constants of one meaning."""

    name: str
    shape: tuple[int, ...]
    centre: tuple[float, ...] | float
    """Of a Gaussian prior of the logarithm; one for all, or one for each of the first axis."""
    spread: float
    common: bool = False
    """Of the device itself, not of how well software uses it: `tightness` does not hold it."""


# Slowdowns against the peak, and the rest: what literature and data sheets suggest, roughly.
_SLOWDOWN = (0.6, 0.5, 2.0, 3.2, 0.4, 0.8, 0.8)
_GROUPS = (
    _Group("peak", (2,), 0.0, 0.7, common=True),
    _Group("bandwidth", (), 0.15, 0.7, common=True),
    _Group("launch", (3,), 0.5, 0.7, common=True),
    _Group("dispatch", (3,), (0.0, 0.0, 0.7), 0.7, common=True),
    _Group("step", (), 0.0, 1.0, common=True),
    _Group("stream", (STREAMS,), 0.1, 1.05),
    _Group("stream_backward", (STREAMS,), 0.0, 0.75),
    _Group("stream_half", (STREAMS,), 0.0, 0.75),
    _Group("stream_last", (STREAMS,), 0.0, 0.9),
    _Group("cache", (len(CACHE_KNOTS) - 1,), (-0.8, -0.6, -0.3), 1.2),
    _Group("stream_columns", (STREAMS,), 1.5, 2.1),
    _Group("optimizer", (), 0.3, 2.1),
    _Group("slowdown", (PRODUCTS, PASSES), _SLOWDOWN, 1.5),
    _Group("slowdown_detail", (DETAIL_COUNT, PASSES), 0.0, 1.2),
    _Group("slowdown_last", (PRODUCTS, PASSES), -0.1, 1.2),
    _Group("slowdown_last_detail", (DETAIL_COUNT, PASSES), 0.0, 1.2),
    _Group("traffic", (PRODUCTS, PASSES), 0.1, 0.9),
    _Group("traffic_last", (PRODUCTS, PASSES), 0.0, 0.9),
    _Group("traffic_columns", (PRODUCTS, PASSES), 0.5, 1.5),
    _Group("reorder", (PRODUCTS, PASSES), -1.0, 2.1),
    _Group("columns", (PRODUCTS, PASSES), 2.5, 2.1),
    _Group("depth", (PRODUCTS, PASSES), 3.5, 2.1),
    _Group("even", (PRODUCTS, ALIGNED_AXES), 0.1, 0.6),
    _Group("odd", (PRODUCTS, ALIGNED_AXES), 0.2, 0.9),
    _Group("pixels", (PRODUCTS, PASSES), 1.5, 2.1),
    _Group("traffic_even", (PRODUCTS, ALIGNED_AXES), 0.05, 0.6),
    _Group("traffic_odd", (PRODUCTS, ALIGNED_AXES), 0.1, 0.9),
    _Group("tile", (len(TILES),), (0.0, 0.15, 0.5), 0.6),
    _Group("overlap", (), 0.3, 0.9),
)
"""All in logarithms: of a time or a slowdown relative to the specification, or (columns, depth) of
the size at which a product reaches half of its speed."""


class StepTimePrior:
    """Simulated time of a step in ms. Instances do not change; see `learner.prior.Prior`."""

    def __init__(self, spec: DeviceSpec = UNKNOWN_GPU, constants: Tensor | None = None) -> None:
        """
        Args:
            spec: of the device whose labels these are or will be.
            constants: as another instance has them (c); by default those of no label.
        """
        self.spec = spec
        self.constants = _centre() if constants is None else constants

    def on(self, spec: DeviceSpec) -> StepTimePrior:
        """These constants on another device: as far from its specification as from ours."""
        return StepTimePrior(spec, self.constants)

    kind_shares = slice(0, PRODUCTS * PASSES + STREAMS * 2 + 1)
    """The features that are shares of the step by kind and direction of kernels; they sum to 1."""

    def log_values(self, workloads: Sequence[Workload]) -> Array:
        if not len(workloads):
            return np.zeros(0)
        with torch.no_grad():
            times = _times(terms_of(workloads, self.spec), _Lookup(self.constants), self.spec)
        values: Array = times.total().log().numpy()
        return values

    def features(self, workloads: Sequence[Workload]) -> Array:
        """Shares of the step by kind and direction of its kernels, and its size (n, f)."""
        if not len(workloads):
            return np.zeros((0, self.kind_shares.stop + DETAIL_COUNT + 4))
        with torch.no_grad():
            terms = terms_of(workloads, self.spec)
            shares = _times(terms, _Lookup(self.constants), self.spec).shares(terms)
        values: Array = shares.numpy()
        return values

    def refit(
        self,
        workloads: Sequence[Workload],
        log_values: Array,
        *,
        log_above: Array | None = None,
        tightness: float = 1.0,
    ) -> Self:
        """Constants fitted to labels; bounds (`log_above`) say little of a time and are left out.

        Student-t errors of the logarithm, Gaussian priors: the most probable constants.

        Raises:
            InputError: workloads and labels differ in number.
        """
        if len(workloads) != len(log_values):
            raise InputError(f"{len(workloads)} workloads and {len(log_values)} labels")
        known = np.isfinite(log_values)
        if not known.any():
            return self
        labels = torch.from_numpy(np.asarray(log_values, dtype=np.float64)[known])
        some = [w for w, k in zip(workloads, known, strict=True) if k]
        chunks = [
            terms_of(some[start : start + CHUNK], self.spec) for start in range(0, len(some), CHUNK)
        ]
        constants = _fit(chunks, labels, self.constants, _spread(tightness), self.spec)
        return type(self)(self.spec, constants)

    def sensitivities(self, workloads: Sequence[Workload]) -> Array:
        """Derivatives of the logarithm by the constants, in units of their spread (n, c)."""
        found = []
        for start in range(0, len(workloads), CHUNK):
            lookup = _Lookup(self.constants, tracked=True)
            terms = terms_of(workloads[start : start + CHUNK], self.spec)
            found.append(lookup.jacobian(_times(terms, lookup, self.spec).total().log()))
        if not found:
            return np.zeros((0, len(self.constants)))
        values: Array = (torch.cat(found) * _spread(1.0)).numpy()
        return values

    def moved(self, by: Array) -> Self:
        """The same formula with constants moved by so many of their spreads (c)."""
        return type(self)(self.spec, self.constants + _spread(1.0) * torch.from_numpy(by))

    def tensors(self) -> dict[str, Tensor]:
        spec = torch.tensor(list(asdict(self.spec).values()), dtype=torch.float64)
        return {"constants": self.constants.clone(), "spec": spec}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Self:
        constants, spec = tensors["constants"], tensors["spec"].tolist()
        if constants.shape != _centre().shape or len(spec) != len(fields(DeviceSpec)):
            raise ValueError(
                f"{tuple(constants.shape)} constants and {len(spec)} numbers of a spec"
            )
        if not constants.isfinite().all() or min(spec) <= 0:
            raise ValueError("constants that are not finite, or a spec that is not positive")
        half, full, bandwidth, cached, units, launch, dispatch = spec
        return cls(
            DeviceSpec(half, full, bandwidth, cached, round(units), launch, dispatch),
            constants.double(),
        )


@dataclass(frozen=True, eq=False)
class _Times:
    """In ms, for n workloads with P kernels that multiply and S that do not."""

    products: Tensor
    """Of each kernel, all its runs together (P)."""
    streams: Tensor
    """(S)."""
    optimizer: Tensor
    """Of each workload (n), as the next ones."""
    host: Tensor
    device: Tensor
    step: Tensor

    def total(self) -> Tensor:
        both = torch.stack([self.device, self.host]).log() * SHARPNESS
        return (both.logsumexp(0) / SHARPNESS).exp() + self.step

    def shares(self, terms: Terms) -> Tensor:
        products, streams = terms.products, terms.streams
        parts = [
            self._by(products.owner, products.base, PRODUCTS * PASSES, self.products),
            self._by(streams.owner, streams.kind * 2 + streams.backward, STREAMS * 2, self.streams),
            self.optimizer[:, None],
            self._by(products.owner, products.detail // PASSES, DETAIL_COUNT, self.products),
        ]
        shares = torch.cat(parts, dim=1) / self.device[:, None]
        sizes = [self.device, self.host, terms.dispatches.sum(1), terms.optimizer_bytes + 1e6]
        return torch.cat([shares, torch.stack(sizes, dim=1).log()], dim=1)

    def _by(self, owner: Tensor, kind: Tensor, kinds: int, times: Tensor) -> Tensor:
        """Sums by workload and kind (n, kinds)."""
        sums = torch.zeros(len(self.host) * kinds, dtype=torch.float64)
        return sums.index_add(0, owner * kinds + kind, times).reshape(-1, kinds)


class _Lookup:
    """The constants by name, picked for each kernel; remembers what was picked for derivatives.

    A kernel's time depends on what was picked for that kernel only. So one backward pass of the
    sum of all times has the derivative of each time by each constant: the whole Jacobian.
    """

    def __init__(self, constants: Tensor, tracked: bool = False) -> None:
        self._constants = constants
        self._tracked = tracked
        self._picked: list[tuple[Tensor, Tensor, Tensor]] = []

    def pick(self, name: str, index: Tensor, owner: Tensor) -> Tensor:
        """The constants of this name at these places of its flattened shape (k).

        Args:
            owner: the workload of each (k).
        """
        place = index + _OFFSETS[name]
        values = self._constants[place]
        if self._tracked:
            values.requires_grad_()
            self._picked.append((values, place, owner))
        return values

    def jacobian(self, values: Tensor) -> Tensor:
        """Derivatives of one value a workload by all constants (n, c)."""
        width = len(self._constants)
        gradients = torch.autograd.grad(values.sum(), [v for v, _, _ in self._picked])
        flat = torch.zeros(len(values) * width, dtype=torch.float64)
        for gradient, (_, place, owner) in zip(gradients, self._picked, strict=True):
            flat.index_add_(0, owner * width + place, gradient)
        return flat.reshape(-1, width)


def _times(terms: Terms, lookup: _Lookup, spec: DeviceSpec) -> _Times:
    products = _product_times(terms.products, lookup, spec)
    streams = _stream_times(terms.streams, lookup, spec)
    workloads = torch.arange(len(terms.dispatches))
    zeros = torch.zeros_like(workloads)

    def pick(name: str, at: int = 0) -> Tensor:
        return lookup.pick(name, zeros + at, workloads)

    per_byte = pick("optimizer") + pick("bandwidth") - np.log(spec.bandwidth_gbs * 1e6)
    optimizer = terms.optimizer_bytes * per_byte.exp()
    optimizer = optimizer + terms.dispatches[:, 2] * _launch(pick("launch", 2), spec)
    device = optimizer.index_add(0, terms.products.owner, products)
    device = device.index_add(0, terms.streams.owner, streams)
    host = torch.stack([pick("dispatch", at) for at in range(3)], dim=1).exp()
    return _Times(
        products=products,
        streams=streams,
        optimizer=optimizer,
        host=(terms.dispatches * host).sum(1) * spec.dispatch_us / 1e3,
        device=device,
        step=pick("step").exp() * STEP_MS,
    )


def _launch(constant: Tensor, spec: DeviceSpec) -> Tensor:
    return constant.exp() * (spec.launch_us / 1e3)


def _product_times(terms: Products, lookup: _Lookup, spec: DeviceSpec) -> Tensor:
    zeros = torch.zeros_like(terms.base)
    kinds = terms.base // PASSES

    def pick(name: str, index: Tensor = terms.base) -> Tensor:
        return lookup.pick(name, index, terms.owner)

    def narrow(name: str, size: Tensor) -> Tensor:
        """Logarithm of how much slower: twice where the size is the constant."""
        return torch.log1p(pick(name).exp() / size)

    def misaligned(even: str, odd: str) -> Tensor:
        slower = torch.zeros_like(terms.log_bytes)
        for axis in range(ALIGNED_AXES):
            place, how = kinds * ALIGNED_AXES + axis, terms.alignment[:, axis]
            slower = slower + (how > 0) * pick(even, place) + (how > 1) * pick(odd, place)
        return slower

    peaks = torch.tensor([spec.full_tflops, spec.half_tflops], dtype=torch.float64)
    peak = pick("peak", terms.half) - (peaks[terms.half] * 1e9).log()
    bandwidth = pick("bandwidth", zeros) - np.log(spec.bandwidth_gbs * 1e6)
    tile = torch.stack([pick("tile", zeros + i) for i in range(len(TILES))], dim=1)
    penalty = (
        pick("slowdown")
        + pick("slowdown_detail", terms.detail)
        + terms.last * (pick("slowdown_last") + pick("slowdown_last_detail", terms.detail))
        + narrow("columns", terms.columns)
        + narrow("depth", terms.depth)
        + narrow("pixels", terms.pixels)
        - torch.logsumexp(-SHARPNESS * (terms.tiles + tile), dim=1) / SHARPNESS
        + misaligned("even", "odd")
    )
    math = terms.log_flops + peak + MOST_PENALTY * torch.tanh(penalty / MOST_PENALTY)
    traffic = (
        pick("traffic")
        + terms.last * pick("traffic_last")
        + narrow("traffic_columns", terms.narrowest)
        + misaligned("traffic_even", "traffic_odd")
    )
    memory = terms.log_bytes + bandwidth + traffic
    power = 1 + pick("overlap", zeros).exp()
    product = (torch.logaddexp(power * math, power * memory) / power).exp()
    reorder = terms.reordered * (terms.log_bytes + pick("reorder") + bandwidth).exp()
    return terms.count * (product + reorder + _launch(pick("launch", zeros), spec))


def _stream_times(terms: Streams, lookup: _Lookup, spec: DeviceSpec) -> Tensor:
    zeros = torch.zeros_like(terms.kind)

    def pick(name: str, index: Tensor = terms.kind) -> Tensor:
        return lookup.pick(name, index, terms.owner)

    slower = (
        pick("stream")
        + terms.backward * pick("stream_backward")
        + terms.half * pick("stream_half")
        + terms.last * pick("stream_last")
    )
    for knot in range(len(CACHE_KNOTS) - 1):
        slower = slower + terms.cache[:, knot] * pick("cache", zeros + knot)
    narrow = torch.log1p(pick("stream_columns").exp() / terms.columns.clamp(min=1))
    slower = slower + narrow * (terms.columns > 0)
    bandwidth = pick("bandwidth", zeros) - np.log(spec.bandwidth_gbs * 1e6)
    moving = (terms.log_bytes + bandwidth + slower).exp()
    return terms.count * (moving + _launch(pick("launch", zeros + 1), spec))


def _fit(
    chunks: Sequence[Terms], labels: Tensor, centre: Tensor, spread: Tensor, spec: DeviceSpec
) -> Tensor:
    """The most probable constants, by damped Gauss-Newton steps on reweighted squares.

    Labels are weighted by how far off they are (Student-t), with a scale from the median error.
    """

    def state(at: Tensor) -> tuple[Tensor, Tensor]:
        errors, jacobians = [], []
        for terms in chunks:
            lookup = _Lookup(at, tracked=True)
            values = _times(terms, lookup, spec).total().log()
            jacobians.append(lookup.jacobian(values))
            errors.append(values.detach())
        return labels - torch.cat(errors), torch.cat(jacobians) * spread

    shift = torch.zeros_like(centre)
    error, jacobian = state(centre)
    damping, scale = 1e-2, 0.5
    for _ in range(ITERATIONS):
        typical = 1.48 * float(error.abs().median())
        scale = max(LEAST_NOISE, min(scale, typical))
        variance = NOISE_DEGREES * scale**2
        weights = (NOISE_DEGREES + 1) / (variance + error**2)

        def loss(e: Tensor, s: Tensor, v: float = variance) -> float:
            return float((NOISE_DEGREES + 1) * torch.log1p(e**2 / v).sum() + (s**2).sum())

        weighted = jacobian * weights[:, None]
        curvature = weighted.T @ jacobian
        curvature.diagonal().add_(1 + damping)
        gradient = weighted.T @ error - shift
        step = torch.linalg.solve(curvature, gradient)
        new_error, new_jacobian = state(centre + spread * (shift + step))
        gain = loss(error, shift) - loss(new_error, shift + step)
        if gain >= 0:
            shift, error, jacobian = shift + step, new_error, new_jacobian
            damping = max(damping / 4, 1e-3)
            if gain < 1e-3 * len(labels) ** 0.5:
                break
        else:
            damping *= 8
    return centre + spread * shift


@cache
def _centre() -> Tensor:
    """The constants before any label."""
    parts = []
    for group in _GROUPS:
        centre = torch.tensor(group.centre, dtype=torch.float64)
        while centre.dim() < len(group.shape):
            centre = centre[..., None]
        parts.append(centre.expand(group.shape).flatten())
    return torch.cat(parts)


def _spread(tightness: float) -> Tensor:
    parts = [
        torch.full(group.shape, group.spread * (1.0 if group.common else tightness)).flatten()
        for group in _GROUPS
    ]
    return torch.cat(parts).double()


_SIZES = [int(np.prod(group.shape)) for group in _GROUPS]
_OFFSETS = dict(zip((g.name for g in _GROUPS), np.cumsum([0, *_SIZES[:-1]]).tolist(), strict=True))
"""Where the constants of each name begin."""


def _named(constants: Tensor) -> dict[str, Tensor]:
    parts = torch.split(constants, _SIZES)
    return {g.name: part.reshape(g.shape) for g, part in zip(_GROUPS, parts, strict=True)}
