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
ITERATIONS = 250
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
    _Group("half", (), 0.0, 0.7, common=True),
    _Group("full", (), 0.0, 0.7, common=True),
    _Group("bandwidth", (), 0.15, 0.7, common=True),
    _Group("launch", (3,), 0.5, 0.7, common=True),
    _Group("dispatch", (3,), (0.0, 0.0, 0.7), 0.7, common=True),
    _Group("step", (), 0.0, 1.0, common=True),
    _Group("stream", (STREAMS,), 0.1, 0.7),
    _Group("stream_backward", (STREAMS,), 0.0, 0.5),
    _Group("stream_half", (STREAMS,), 0.0, 0.5),
    _Group("stream_last", (STREAMS,), 0.0, 0.6),
    _Group("cache", (len(CACHE_KNOTS) - 1,), (-0.8, -0.6, -0.3), 0.8),
    _Group("stream_columns", (STREAMS,), 1.5, 1.4),
    _Group("optimizer", (), 0.3, 1.4),
    _Group("slowdown", (PRODUCTS, PASSES), _SLOWDOWN, 1),
    _Group("slowdown_detail", (DETAIL_COUNT, PASSES), 0.0, 0.8),
    _Group("slowdown_last", (PRODUCTS, PASSES), -0.1, 0.8),
    _Group("slowdown_last_detail", (DETAIL_COUNT, PASSES), 0.0, 0.8),
    _Group("traffic", (PRODUCTS, PASSES), 0.1, 0.6),
    _Group("traffic_last", (PRODUCTS, PASSES), 0.0, 0.6),
    _Group("traffic_columns", (PRODUCTS, PASSES), 0.5, 1.0),
    _Group("reorder", (PRODUCTS, PASSES), -1.0, 1.4),
    _Group("columns", (PRODUCTS, PASSES), 2.5, 1.4),
    _Group("depth", (PRODUCTS, PASSES), 3.5, 1.4),
    _Group("even", (PRODUCTS, ALIGNED_AXES), 0.1, 0.4),
    _Group("odd", (PRODUCTS, ALIGNED_AXES), 0.2, 0.6),
    _Group("pixels", (PRODUCTS, PASSES), 1.5, 1.4),
    _Group("traffic_even", (PRODUCTS, ALIGNED_AXES), 0.05, 0.4),
    _Group("traffic_odd", (PRODUCTS, ALIGNED_AXES), 0.1, 0.6),
    _Group("tile", (len(TILES),), (0.0, 0.15, 0.5), 0.4),
    _Group("overlap", (), 0.3, 0.6),
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
            times = _times(terms_of(workloads, self.spec), self.constants, self.spec)
        values: Array = times.total().log().numpy()
        return values

    def features(self, workloads: Sequence[Workload]) -> Array:
        """Shares of the step by kind and direction of its kernels, and its size (n, f)."""
        if not len(workloads):
            return np.zeros((0, self.kind_shares.stop + DETAIL_COUNT + 4))
        with torch.no_grad():
            terms = terms_of(workloads, self.spec)
            shares = _times(terms, self.constants, self.spec).shares(terms)
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

        Student-t errors of the logarithm, Gaussian priors, L-BFGS: the most probable constants.

        Raises:
            InputError: workloads and labels differ in number.
        """
        if len(workloads) != len(log_values):
            raise InputError(f"{len(workloads)} workloads and {len(log_values)} labels")
        known = np.isfinite(log_values)
        if not known.any():
            return self
        labels = torch.from_numpy(np.asarray(log_values, dtype=np.float64)[known])
        terms = terms_of([w for w, k in zip(workloads, known, strict=True) if k], self.spec)
        spread = _spread(tightness)
        constants = _fit(terms, labels, self.constants, spread, self.spec)
        return type(self)(self.spec, constants)

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


def _times(terms: Terms, constants: Tensor, spec: DeviceSpec) -> _Times:
    c = _named(constants)
    bandwidth = c["bandwidth"] - np.log(spec.bandwidth_gbs * 1e6)
    """Log of ms for a byte."""
    launch = (c["launch"] + np.log(spec.launch_us / 1e3)).exp()
    products = _product_times(terms.products, c, spec, bandwidth, launch[0])
    streams = _stream_times(terms.streams, c, bandwidth, launch[1])
    optimizer = terms.optimizer_bytes * (c["optimizer"] + bandwidth).exp()
    optimizer = optimizer + terms.dispatches[:, 2] * launch[2]
    device = optimizer.index_add(0, terms.products.owner, products)
    device = device.index_add(0, terms.streams.owner, streams)
    return _Times(
        products=products,
        streams=streams,
        optimizer=optimizer,
        host=terms.dispatches @ (c["dispatch"] + np.log(spec.dispatch_us / 1e3)).exp(),
        device=device,
        step=(c["step"] + np.log(0.1)).exp(),
    )


def _product_times(
    terms: Products, c: dict[str, Tensor], spec: DeviceSpec, bandwidth: Tensor, launch: Tensor
) -> Tensor:
    peak = torch.where(
        terms.half > 0,
        c["half"] - np.log(spec.half_tflops * 1e9),
        c["full"] - np.log(spec.full_tflops * 1e9),
    )

    def of_base(name: str) -> Tensor:
        return c[name].flatten()[terms.base]

    def size_of(name: str) -> Tensor:
        return c[name].exp().flatten()[terms.base]

    def of_detail(name: str) -> Tensor:
        return c[name].flatten()[terms.detail]

    penalty = (
        of_base("slowdown")
        + of_detail("slowdown_detail")
        + terms.last * (of_base("slowdown_last") + of_detail("slowdown_last_detail"))
        + torch.log1p(size_of("columns") / terms.columns)
        + torch.log1p(size_of("depth") / terms.depth)
        + torch.log1p(size_of("pixels") / terms.pixels)
        - torch.logsumexp(-SHARPNESS * (terms.tiles + c["tile"]), dim=1) / SHARPNESS
        + _misaligned(terms, c["even"], c["odd"])
    )
    bounded = MOST_PENALTY * torch.tanh(penalty / MOST_PENALTY)
    math = terms.log_flops + peak + bounded
    traffic = of_base("traffic") + terms.last * of_base("traffic_last")
    traffic = traffic + torch.log1p(size_of("traffic_columns") / terms.narrowest)
    traffic = traffic + _misaligned(terms, c["traffic_even"], c["traffic_odd"])
    memory = terms.log_bytes + bandwidth + traffic
    power = 1 + c["overlap"].exp()
    product = (torch.logaddexp(power * math, power * memory) / power).exp()
    reorder = terms.reordered * (terms.log_bytes + of_base("reorder") + bandwidth).exp()
    return terms.count * (product + reorder + launch)


def _misaligned(terms: Products, even: Tensor, odd: Tensor) -> Tensor:
    """For even and odd sizes (kinds, axes): logarithm of the slowdown of each kernel (P)."""
    by_axis = torch.stack([torch.zeros_like(even), even, even + odd], dim=2)
    kinds = terms.base // PASSES
    slowdown = torch.zeros_like(terms.log_bytes)
    for axis in range(ALIGNED_AXES):
        slowdown = slowdown + by_axis[:, axis].flatten()[kinds * 3 + terms.alignment[:, axis]]
    return slowdown


def _stream_times(
    terms: Streams, c: dict[str, Tensor], bandwidth: Tensor, launch: Tensor
) -> Tensor:
    kind = terms.kind
    cached = terms.cache @ torch.cat([c["cache"], torch.zeros(1, dtype=torch.float64)])
    factor = (
        c["stream"][kind]
        + terms.backward * c["stream_backward"][kind]
        + terms.half * c["stream_half"][kind]
        + terms.last * c["stream_last"][kind]
        + cached
    )
    narrow = torch.log1p(c["stream_columns"].exp()[kind] / terms.columns.clamp(min=1))
    factor = factor + narrow * (terms.columns > 0)
    return terms.count * ((terms.log_bytes + bandwidth + factor).exp() + launch)


def _fit(terms: Terms, labels: Tensor, centre: Tensor, spread: Tensor, spec: DeviceSpec) -> Tensor:
    """The most probable constants; the error's scale is fitted beside."""
    shift = torch.zeros(len(centre) + 1, dtype=torch.float64)
    shift[-1] = np.log(0.1)
    shift.requires_grad_()
    optimizer = torch.optim.LBFGS(
        [shift],
        max_iter=ITERATIONS,
        max_eval=ITERATIONS * 5 // 4,
        history_size=20,
        tolerance_change=1e-7,
        line_search_fn="strong_wolfe",
    )
    half = (NOISE_DEGREES + 1) / 2

    def loss() -> Tensor:
        optimizer.zero_grad()
        at = centre + spread * shift[:-1]
        error = labels - _times(terms, at, spec).total().log()
        scale = LEAST_NOISE + shift[-1].exp()
        misfit = half * torch.log1p((error / scale) ** 2 / NOISE_DEGREES) + scale.log()
        value = misfit.sum() + 0.5 * (shift[:-1] ** 2).sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return (centre + spread * shift[:-1]).detach()


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


def _named(constants: Tensor) -> dict[str, Tensor]:
    parts = torch.split(constants, [int(np.prod(group.shape)) for group in _GROUPS])
    return {g.name: part.reshape(g.shape) for g, part in zip(_GROUPS, parts, strict=True)}
