"""A step's cost as a sum of terms of its graph, with few unknown coefficients.

A step's time is about the sum of its kernels' times, so the prior of a metric is
`sum_k exp(theta_k) * term_k(graph)`. The terms are in the metric's unit for a made-up reference
device; the coefficients are how this device differs from it. They have log-normal priors, which
keeps them positive and lets a handful of labels fit them, and they are fitted to the *relative*
error with a robust likelihood, since some runs surprise everybody. A new device starts from the
coefficients of a known one, which is most of what transfers.

The spreads of the priors are judgements, not fits: a factor of two (0.7) for what kernels of one
kind reach of a peak, of three for launching, of twenty (3.0) for how devices differ altogether.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from trappm.learner.stats.student_t import losses, precisions
from trappm.profiler.graphs.nodes import BYTES_PER_ELEMENT
from trappm.profiler.records import Graph

Array = npt.NDArray[np.float64]

# The reference device: 1 TFLOP/s, 100 GB/s and 100 W. A training step does about three forward
# passes, and each multiply-accumulate is two operations; 20 us for a node are for launches.
# Round numbers: labels move all of them.
MS_PER_MAC = 3 * 2 / 1e12 * 1e3
MS_PER_BYTE = 3 / 1e11 * 1e3
MS_PER_NODE = 0.02
MS_PER_STEP = 1.0
J_PER_MS = 0.1

NORMS = frozenset({"BatchNormalization", "LayerNormalization", "GroupNormalization",
                   "InstanceNormalization", "RMSNormalization", "LpNormalization"})  # fmt: skip
PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum", "Attention"})
VIEWS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout", "Shape"})
MOVES = frozenset({"Transpose", "Concat", "Slice", "Split", "Gather", "Pad", "Expand", "Resize",
                   "DepthToSpace", "ScatterND", "GatherND", "GatherElements"})  # fmt: skip


@dataclass(frozen=True)
class TermSpec:
    """A term's name and how far its coefficient may lie from the centre (sd of its logarithm)."""

    name: str
    spread: float


@dataclass(frozen=True)
class PriorSpec:
    """The terms of a metric, and how far all coefficients may move together (sd of the log)."""

    terms: tuple[TermSpec, ...]
    common_spread: float


# Launching, arithmetic by kind of kernel (they reach very different shares of the peak), and
# traffic by kind of operator; devices differ by orders of magnitude, mostly in common. A spread of
# 0.7 is a factor of two, of 1.5 one of five: round numbers, since labels decide.
_WORK = PriorSpec(
    (
        TermSpec("step", 1.5),
        TermSpec("launch", 1.5),
        TermSpec("macs_dense", 0.7),
        TermSpec("macs_pointwise", 0.7),
        TermSpec("macs_matmul", 0.7),
        TermSpec("macs_grouped", 1.0),
        TermSpec("traffic_product", 0.7),
        TermSpec("traffic_norm", 0.7),
        TermSpec("traffic_elementwise", 0.7),
        TermSpec("traffic_move", 0.7),
        TermSpec("traffic_weights", 0.7),
    ),
    common_spread=3.0,
)

PRIORS: dict[str, PriorSpec] = {
    "step_time_ms": _WORK,
    # Energy: the same work, at a power that differs less among kernels than their time does.
    "energy_j": _WORK,
    # Idle power, and more of it the busier arithmetic and memory are.
    "power_w": PriorSpec(
        (
            TermSpec("idle", 0.5),
            TermSpec("arithmetic", 0.5),
            TermSpec("traffic", 0.5),
            TermSpec("occupancy", 0.5),
        ),
        common_spread=1.5,
    ),
}
"""For each metric, its terms in the order of `term_matrix`."""


def term_matrix(graphs: Sequence[Graph], metric: str) -> Array:
    """The terms of every graph (n, k), in the metric's unit for the reference device."""
    rows = np.array([list(_TERMS[metric](_totals(graph))) for graph in graphs], dtype=np.float64)
    return rows.reshape(len(graphs), len(PRIORS[metric].terms))


def log_prior(terms: Array, coefficients: Array) -> Array:
    """Logarithm of `sum_k exp(theta_k) * term_k` (n) for terms (n, k) and log coefficients (k)."""
    values: Array = np.log(terms @ np.exp(coefficients))
    return values


def fit_coefficients(
    terms: Array,
    log_values: Array,
    spec: PriorSpec,
    *,
    centre: Array | None = None,
    tightness: float = 1.0,
    log_above: Array | None = None,
) -> Array:
    """The most probable log coefficients theta (k) of `sum_k exp(theta_k) * term_k`.

    Student-t errors of the logarithm, their scale fitted beside, by iteratively reweighted, damped
    Gauss-Newton steps. A label of which only a bound is known pulls while the sum stays below the
    bound, and has no effect above it.

    Args:
        terms: (n, k).
        log_values: logarithm of what was measured (n); NaN where only a bound is known.
        spec: the priors of the coefficients.
        centre: where the prior of theta is centred; by default on the reference device.
        tightness: factor on the spread of single coefficients, below 1 for a well-known centre.
        log_above: logarithm of a lower bound of the value (n), where it is not known.
    """
    middle = np.zeros(len(spec.terms)) if centre is None else centre
    measured = ~np.isnan(log_values)
    targets = log_values
    if log_above is not None:
        targets = np.where(measured, log_values, log_above)
        terms, measured, targets = (a[~np.isnan(targets)] for a in (terms, measured, targets))
    if not measured.any():
        return middle
    spreads = tightness * np.array([term.spread for term in spec.terms])
    precision: Array = np.asarray(
        np.linalg.inv(np.diag(spreads**2) + spec.common_spread**2), dtype=np.float64
    )
    # All coefficients at once first: the level of a new device may be off by a factor of 1000.
    level = float(np.median((targets - log_prior(terms, middle))[measured]))
    start = middle + level * spec.common_spread**2 / (spec.common_spread**2 + 0.1)
    return _Fit(terms, targets, measured, middle, precision).best(start)


FIRST_SCALE, LEAST_SCALE = 0.3, 0.01
"""Of the errors of the logarithm, where a fit begins and at the least: round numbers."""
ITERATIONS = 60
"""At most; fits end sooner."""


@dataclass(frozen=True, eq=False)
class _Fit:
    """A search for coefficients: labels, and the normal prior of the coefficients."""

    terms: Array
    targets: Array
    measured: npt.NDArray[np.bool_]
    """Whether a target is a value (n), or a lower bound."""
    middle: Array
    precision: Array

    def best(self, theta: Array) -> Array:
        """The most probable coefficients, from these on."""
        damping, scale = 1e-3, FIRST_SCALE
        residual, jacobian = self._state(theta)
        for _ in range(ITERATIONS):
            scale = min(scale, 1.48 * float(np.median(np.abs(residual[self.measured]))))
            scale = max(LEAST_SCALE, scale)
            step = self._step(theta, residual, jacobian, scale, damping)
            new_residual, new_jacobian = self._state(theta + step)
            if self._loss(new_residual, theta + step, scale) <= self._loss(residual, theta, scale):
                theta, residual, jacobian = theta + step, new_residual, new_jacobian
                damping = max(damping / 3, 1e-6)
                if float(np.max(np.abs(step))) < 1e-6:
                    break
            else:
                damping = min(damping * 5, 1e6)
        return theta

    def _state(self, theta: Array) -> tuple[Array, Array]:
        """Errors of the logarithm (n), and the derivatives of the sum's logarithm (n, k)."""
        parts = self.terms * np.exp(theta)
        total = parts.sum(axis=1)
        gaps = self.targets - np.log(total)
        return np.where(self.measured, gaps, np.maximum(gaps, 0.0)), parts / total[:, None]

    def _loss(self, residual: Array, theta: Array, scale: float) -> float:
        """Twice the negative log posterior at this scale, up to a constant."""
        gap = theta - self.middle
        return 2.0 * float(losses(residual, scale).sum()) + float(gap @ self.precision @ gap)

    def _step(
        self, theta: Array, residual: Array, jacobian: Array, scale: float, damping: float
    ) -> Array:
        weights = precisions(residual**2, scale)
        gradient = jacobian.T @ (weights * residual) - self.precision @ (theta - self.middle)
        curvature = (jacobian * weights[:, None]).T @ jacobian + self.precision
        damped = curvature + damping * np.diag(np.diag(curvature))
        return np.clip(np.linalg.solve(damped, gradient), -1.0, 1.0)


@dataclass(frozen=True)
class _Totals:
    """Sums over the nodes of a graph, by kind of operator."""

    batch_size: int
    nodes: int
    macs: dict[str, float]
    traffic: dict[str, float]
    """Bytes of inputs and outputs."""
    parameters: float


_KNOWN: WeakKeyDictionary[Graph, _Totals] = WeakKeyDictionary()
"""A fit asks for the same graphs once for each fold."""


def _totals(graph: Graph) -> _Totals:
    if graph not in _KNOWN:
        _KNOWN[graph] = _sums(graph)
    return _KNOWN[graph]


def _sums(graph: Graph) -> _Totals:
    elements_in = _elements(graph.input_shapes)
    elements_out = _elements(graph.output_shapes)
    out_bytes = np.maximum(
        graph.memory_bytes - BYTES_PER_ELEMENT * graph.parameters, 0
    ).astype(np.float64)  # fmt: skip
    traffic = BYTES_PER_ELEMENT * elements_in + out_bytes
    kinds = np.array([_KIND_OF.get(operator, "elementwise") for operator in graph.operators])
    per_output = graph.macs / np.maximum(elements_out, 1.0)
    channels = graph.input_shapes[:, 1].astype(np.float64)
    is_convolution = np.isin(graph.operators, ("Conv", "ConvTranspose"))
    # A dense k x k convolution costs channels * k^2 per output, a grouped one less than channels
    # as soon as it has more groups than k^2.
    grouped = is_convolution & (per_output < channels)
    pointwise = is_convolution & (per_output == channels)
    dense = is_convolution & (per_output > channels)
    macs = graph.macs.astype(np.float64)
    return _Totals(
        batch_size=graph.batch_size,
        nodes=int(np.sum(kinds != "view")),
        macs={
            "grouped": float(macs[grouped].sum()),
            "pointwise": float(macs[pointwise].sum()),
            "dense": float(macs[dense].sum()),
            "matmul": float(macs[~is_convolution].sum()),
        },
        traffic={kind: float(traffic[kinds == kind].sum()) for kind in _KINDS},
        parameters=float(graph.parameters.sum()),
    )


_KINDS = ("product", "norm", "elementwise", "move")


_KIND_OF = {
    operator: kind
    for kind, members in (("product", PRODUCTS), ("norm", NORMS), ("view", VIEWS), ("move", MOVES))
    for operator in members
}


def _elements(shapes: npt.NDArray[np.int64]) -> Array:
    """Elements of each padded shape (N); a node without a shape has none."""
    sizes = np.where(shapes > 0, shapes, 1).astype(np.float64)
    return np.where((shapes > 0).any(axis=1), sizes.prod(axis=1), 0.0)


def _step_time(t: _Totals) -> list[float]:
    return [
        MS_PER_STEP,
        MS_PER_NODE * t.nodes,
        MS_PER_MAC * t.macs["dense"],
        MS_PER_MAC * t.macs["pointwise"],
        MS_PER_MAC * t.macs["matmul"],
        MS_PER_MAC * t.macs["grouped"] * 10,
        MS_PER_BYTE * t.traffic["product"],
        MS_PER_BYTE * t.traffic["norm"],
        MS_PER_BYTE * t.traffic["elementwise"],
        MS_PER_BYTE * t.traffic["move"],
        MS_PER_BYTE * BYTES_PER_ELEMENT * t.parameters,
    ]


def _power(t: _Totals) -> list[float]:
    arithmetic = MS_PER_MAC * sum(t.macs.values())
    traffic = MS_PER_BYTE * sum(t.traffic.values())
    waiting = MS_PER_STEP + MS_PER_NODE * t.nodes
    total = arithmetic + traffic + waiting
    return [20.0, 100 * arithmetic / total, 100 * traffic / total,
            50 * t.batch_size / (t.batch_size + 16)]  # fmt: skip


def _energy(t: _Totals) -> list[float]:
    return [J_PER_MS * term for term in _step_time(t)]


_TERMS = {
    "step_time_ms": _step_time,
    "power_w": _power,
    "energy_j": _energy,
}
