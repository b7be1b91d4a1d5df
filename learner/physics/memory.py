"""Memory of a step on GPUs: its simulated allocations, and a prior with four constants on top.

    memory = process + tensors * live + fragments * (reserved - live)
                     + scratch * (scratch memory of convolutions)

The sizes come from a training step replayed through CUDA's allocator
(`profiler.memory.simulation`). If no step could be traced, `step_memory` estimates them from the
graph. All constants are 1 for a card that the simulation describes exactly. Published labels do not
name their training loop, so the loop that explains them best is assumed. CPUs have their own
formula (`cpu_priors`).

A few numbers describe what makes a peak uncertain: how far scratch memory of each kind of
convolution would lift it (cuDNN's choice of algorithm, which no trace knows), how large single
tensors are (fragmentation), and what the peak is made of. A replay takes milliseconds, so its
result is cached as long as its trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from trappm.learner.interface import Array, BoolArray, Workload, cache_on_first
from trappm.learner.physics.prior import OPERATORS, PriorSpec, TermPrior, operator_shares
from trappm.profiler.devices.catalogue import CONTEXT_MIB, DeviceSpec
from trappm.profiler.graphs.nodes import BYTES_PER_ELEMENT, VIEWS
from trappm.profiler.memory.simulation import MIB, LoopPreset, memory_of
from trappm.profiler.records import Graph, MemoryFormat, Optimizer, Phase
from trappm.profiler.traced_step import ConvolutionKind, Event, Pass, Trace

CONVOLUTION_KINDS = len(ConvolutionKind)
SCRATCH_KINDS = CONVOLUTION_KINDS * len(Pass)
AMP_SHARE = 0.6
"""Share of the memory of an fp32 step without its weights that a step under autocast keeps:
most activations are halved, norms and losses are not, and half-precision copies of weights are
added (Micikevicius et al. 2018, section 4, report about a half for whole models). Not fitted;
labels correct it."""

KEPT_SHARE = 0.5
"""Share of the bytes written by operators other than views that an untraced step keeps
(docs/research/memory.md)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepMemory:
    """Peaks of one step in MiB, and shares of the live peak."""

    live_mib: float
    """Tensors alive at once."""
    fragments_mib: float
    """Segments taken from the device beyond that."""
    scratch_mib: float
    """More segments with scratch memory of convolutions; less than 0 where it fills gaps."""
    weights_mib: float
    """Parameters, buffers and optimizer states."""
    scratch_lift: Array
    """Rise of the live peak by scratch memory as large as the tensors of each convolution, by kind
    and pass, relative to the live peak (SCRATCH_KINDS)."""
    scratch_largest: Array
    """Bytes touched by the largest convolution of each kind and pass, relative to the live peak."""
    convolutions: Array
    """Number of convolutions of each kind (4)."""
    touched: Array
    """Bytes touched by all forward convolutions of each kind, relative to the live peak (4)."""
    largest: float
    """Largest tensor relative to the live peak."""
    kept: float
    """Live bytes at the end of the forward pass over the live peak."""
    peak_at: float
    """Share of the step's events before the peak."""
    allocations: int
    small: float
    """Share of the allocations that are served from small segments."""


def step_memory(workload: Workload, loop: LoopPreset = LoopPreset.PLAIN) -> StepMemory:
    """Return the simulated memory of the step, or an fp32 estimate from the graph."""
    if workload.trace is not None:
        return _simulate(workload.trace, workload.batch_size, workload.optimizer, loop)
    if workload.phase is Phase.INFER:
        return _forward_only(workload.graph)
    return _estimate_untraced(workload.graph, workload.optimizer, loop)


def amp_factor(workload: Workload, memory: StepMemory) -> float:
    """Return the factor of the precision on memory that was estimated in fp32."""
    if workload.precision.is_fp32 or workload.trace is not None:
        return 1.0
    weights = min(memory.weights_mib / memory.live_mib, 1.0)
    return weights + AMP_SHARE * (1.0 - weights)


@cache_on_first
def _simulate(trace: Trace, batch_size: int, optimizer: Optimizer, loop: LoopPreset) -> StepMemory:
    peaks, events = memory_of(trace, batch_size, optimizer, loop), trace.allocations
    assert events is not None  # noqa: S101  (a workload has no other traces)
    sizes = events.sizes_at(batch_size).astype(np.float64)
    born, died = (events.kinds == kind for kind in (Event.ALLOCATE, Event.FREE))
    blocks = sizes[born]
    change = np.where(born, sizes, 0.0)
    change[died] = -blocks[events.blocks[died]]
    parameters = events.parameter_bytes, events.parameter_places, events.element_bytes
    states = loop.with_optimizer(optimizer).state_bytes(*(each.tolist() for each in parameters))
    weights = float(events.parameter_bytes.sum() + events.buffer_bytes.sum() + states)
    live = weights + np.cumsum(change)
    peak = float(live.max(initial=weights))
    timed = events.kinds != Event.ACCUMULATE  # features were chosen without these events
    scratch = events.kinds == Event.WORKSPACE
    lift, largest = np.zeros(SCRATCH_KINDS), np.zeros(SCRATCH_KINDS)
    for kind in range(SCRATCH_KINDS):
        here = scratch & (events.blocks == kind)
        lift[kind] = max((live[here] + sizes[here]).max(initial=0.0) - peak, 0.0) / peak
        largest[kind] = sizes[here].max(initial=0.0) / peak
    forward = scratch & (events.blocks % len(Pass) == Pass.FORWARD)
    kinds = events.blocks[forward] // len(Pass)
    return StepMemory(
        live_mib=peaks.live_mib,
        fragments_mib=max(peaks.reserved_mib - peaks.live_mib, 0.0),
        scratch_mib=peaks.reserved_with_workspace_mib - peaks.reserved_mib,
        weights_mib=weights / MIB,
        scratch_lift=lift,
        scratch_largest=largest,
        convolutions=np.bincount(kinds, minlength=CONVOLUTION_KINDS).astype(np.float64),
        touched=np.bincount(kinds, sizes[forward], CONVOLUTION_KINDS) / peak,
        largest=float(blocks.max(initial=0.0)) / peak,
        kept=float(live[events.end_of_forward]) / peak,
        peak_at=np.count_nonzero(timed[: live.argmax()]) / np.count_nonzero(timed),
        allocations=len(blocks),
        small=float(np.mean(blocks <= MIB)) if len(blocks) else 0.0,
    )


@cache_on_first
def _estimate_untraced(graph: Graph, optimizer: Optimizer, loop: LoopPreset) -> StepMemory:
    """Estimate weights, states, gradients, and a share of all results for the backward pass."""
    outputs = graph.memory_bytes - BYTES_PER_ELEMENT * graph.parameters
    kept = KEPT_SHARE * float(outputs[[name not in VIEWS for name in graph.operators]].sum())
    sizes = (BYTES_PER_ELEMENT * graph.parameters).tolist()
    parameters = float(sum(sizes))
    widths = [BYTES_PER_ELEMENT] * len(sizes)
    states = loop.with_optimizer(optimizer).state_bytes(sizes, range(len(sizes)), widths)
    weights = parameters + states
    return _estimate_from_graph(graph, (weights + parameters + kept) / MIB, weights / MIB)


@cache_on_first
def _forward_only(graph: Graph) -> StepMemory:
    """Simulate inference: each tensor lives until its last reader has run."""
    outputs = (graph.memory_bytes - BYTES_PER_ELEMENT * graph.parameters).astype(np.float64)
    last = np.arange(graph.node_count)
    np.maximum.at(last, graph.edges[:, 0], graph.edges[:, 1])
    change = np.zeros(graph.node_count + 1)
    change[:-1] += outputs
    np.subtract.at(change, last + 1, outputs)
    weights = BYTES_PER_ELEMENT * float(graph.parameters.sum())
    live = weights + float(np.cumsum(change).max(initial=0.0))
    return _estimate_from_graph(graph, live / MIB, weights / MIB)


def _estimate_from_graph(graph: Graph, live_mib: float, weights_mib: float) -> StepMemory:
    """Estimate the memory from the graph, without passes or the order of events."""
    live = max(live_mib, 1.0)
    outputs = graph.memory_bytes - BYTES_PER_ELEMENT * graph.parameters
    return StepMemory(
        live_mib=live,
        fragments_mib=0.0,
        scratch_mib=0.0,
        weights_mib=weights_mib,
        scratch_lift=np.zeros(SCRATCH_KINDS),
        scratch_largest=np.zeros(SCRATCH_KINDS),
        convolutions=np.zeros(CONVOLUTION_KINDS),
        touched=np.zeros(CONVOLUTION_KINDS),
        largest=float(outputs.max(initial=0)) / MIB / live,
        kept=1.0,
        peak_at=0.5,
        allocations=graph.node_count,
        small=0.0,
    )


# Narrow spreads are best for few labels (docs/research/memory.md).
SPEC = PriorSpec(
    {
        "process": 0.7,  # more with more libraries loaded
        "tensors": 0.03,  # bytes are bytes
        "fragments": 0.2,  # from the allocator's rules, which a CPU does not have
        "scratch": 0.3,  # cuDNN's choices, fitted on other labels
    },
    common_spread=0.05,
)
PROCESS_MIB = 1750.0
"""Unit of the first constant: memory without the step in GPUMemNet's labels of an A100, which
have a GiB more than a plain process (docs/research/memory.md)."""
INFERENCE_SHARE = (686 + 33) / (760 + 65)
"""Ratio of the process memory of inference and training on an H100: fewer libraries and workspaces
(`profiler.devices.catalogue`)."""
LABELS_FOR_LOOP = 200
"""Number of labels that distinguishes the loops; a round number. Each is replayed per loop."""
TYPICAL_ERROR = 0.03
"""Typical error of the logarithm with the right loop: 2.8 % by architecture, rounded up
(docs/research/memory.md)."""

CONVOLUTION_FEATURES = 10

FFT_TILE = 32 * 32
"""cuDNN's tiled transform works on tiles of 32 x 32."""

FEATURE_GROUPS = (
    6,
    len(SPEC.spreads),
    2 * SCRATCH_KINDS,
    2 * CONVOLUTION_KINDS,
    6,
    len(OPERATORS),
    CONVOLUTION_FEATURES,
)


class MemoryPrior(TermPrior):
    """Prior of the memory on GPUs."""

    feature_groups = FEATURE_GROUPS

    def __init__(
        self, log_constants: Array | None = None, loop: LoopPreset = LoopPreset.PLAIN
    ) -> None:
        super().__init__(SPEC, log_constants)
        self.loop = loop

    @classmethod
    def on(cls, device: DeviceSpec | None) -> Self:
        """Return the prior of a device before any label; None is a device without a data sheet."""
        constants = np.zeros(len(SPEC.spreads))
        training_mib = CONTEXT_MIB[Phase.TRAIN] if device is None else device.process_mib
        constants[0] = np.log(training_mib / PROCESS_MIB)
        constants[2] = 0.0 if device is None else np.log(device.fragments)
        return cls(constants)

    def process_mib(self, phase: Phase) -> float:
        """Return the memory of a process without its step, as the labels have it."""
        return _process_unit_mib(phase) * float(np.exp(self.log_constants[0]))

    def with_constants(self, log_constants: Array) -> Self:
        return type(self)(log_constants, self.loop)

    def started_from(self, other: Self) -> Self:
        return type(self)(other.log_constants, other.loop)

    def variant(
        self, workloads: Sequence[Workload], log_values: Array, tightness: float, near: Self | None
    ) -> Self:
        """Return the prior with the loop of the least Student-t loss on some labels when fitted."""
        if near is not None:
            return self._in(near.loop)
        known = np.flatnonzero(~np.isnan(log_values))
        if not len(known):
            return self
        # Strides are powers of two, so more labels mostly reuse rows that have been replayed.
        rows = known[:: 1 << (len(known) // LABELS_FOR_LOOP).bit_length()]
        labelled, values = [workloads[i] for i in rows], log_values[rows]

        def loss(loop: LoopPreset) -> tuple[float, bool]:
            fitted = self._in(loop).fitted(labelled, values, None, tightness)
            errors = (fitted.log_values(labelled) - values) / TYPICAL_ERROR
            return float(np.log1p(errors**2 / 4.0).sum()), loop is not self.loop

        return self._in(min(LoopPreset, key=loss))

    def _in(self, loop: LoopPreset) -> Self:
        return type(self)(self.log_constants, loop)

    def terms(self, workloads: Sequence[Workload]) -> Array:
        """Return the terms of each workload in MiB (n, 4)."""
        rows = []
        for workload in workloads:
            memory = step_memory(workload, self.loop)
            factor = amp_factor(workload, memory)
            parts = memory.live_mib, memory.fragments_mib, memory.scratch_mib
            process_mib = _process_unit_mib(workload.phase)
            rows.append([process_mib, *(factor * part for part in parts)])
        return np.array(rows, dtype=np.float64).reshape(len(workloads), len(SPEC.spreads))

    def features_of(self, workloads: Sequence[Workload], logs: Array, shares: Array) -> Array:
        """Return size, shares of the terms, scratch memory and composition of the peak (n, f)."""
        rows = [
            _features(workload, step_memory(workload, self.loop), parts, size)
            for workload, parts, size in zip(workloads, shares, logs, strict=True)
        ]
        return np.array(rows, dtype=np.float64).reshape(len(workloads), sum(FEATURE_GROUPS))

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        return cls(tensors["log_constants"].numpy(), list(LoopPreset)[int(tensors["loop"])])

    def tensors(self) -> dict[str, Tensor]:
        return {**super().tensors(), "loop": torch.tensor(list(LoopPreset).index(self.loop))}


def _process_unit_mib(phase: Phase) -> float:
    return PROCESS_MIB * (INFERENCE_SHARE if phase is Phase.INFER else 1.0)


def _features(
    workload: Workload, memory: StepMemory, shares: Array, log_size: float
) -> list[float]:
    graph = workload.graph
    return [
        log_size,
        float(np.log(graph.batch_size)),
        float(np.log1p(memory.allocations)),
        float(not workload.precision.is_fp32),
        float(workload.memory_format is MemoryFormat.CHANNELS_LAST),
        float(workload.phase is Phase.INFER),
        *shares,
        *memory.scratch_lift,
        *memory.scratch_largest,
        *np.log1p(memory.convolutions),
        *memory.touched,
        memory.weights_mib / memory.live_mib,
        memory.scratch_mib / memory.live_mib,
        memory.largest,
        memory.kept,
        memory.peak_at,
        memory.small,
        *operator_shares(graph),
        *convolution_scratch(graph),
    ]


def convolution_scratch(graph: Graph) -> Array:
    """Return the largest scratch memory of each convolution algorithm as log(1 + MiB) (10).

    For k x k convolutions: spectra of images and filters (Mathieu et al. 2014), filters in tiles,
    Winograd's transforms of 4 x 4 tiles (Lavin and Gray 2016); for these, pointwise and grouped
    ones, copies of input and output in another layout. Then how wide they are, the share whose
    channels are no multiple of 4 (no tensor cores), and how far the images are from square.
    """
    chosen = np.array([operator == "Conv" for operator in graph.operators], dtype=bool)
    if not chosen.any():
        return np.zeros(CONVOLUTION_FEATURES)
    inputs, outputs = (
        np.maximum(s[chosen].astype(np.float64), 1.0)
        for s in (graph.input_shapes, graph.output_shapes)
    )
    batch = float(graph.batch_size)
    channels, filters = inputs[:, 1], outputs[:, 1]
    pixels, results = inputs[:, 2] * inputs[:, 3], outputs[:, 2] * outputs[:, 3]
    made_of = graph.macs[chosen] // (batch * filters * results)
    pointwise = made_of == channels
    dense = ~pointwise & (made_of % channels == 0)
    complexes = 2 * BYTES_PER_ELEMENT / MIB
    spectra = complexes * pixels * (channels * filters + batch * (channels + filters))
    tiles = complexes * FFT_TILE * channels * filters
    transforms = channels * filters + batch * results / 4 * (channels + filters)
    winograd = 16 * BYTES_PER_ELEMENT / MIB * transforms
    copies = BYTES_PER_ELEMENT / MIB * batch * (channels * pixels + filters * results)

    def largest(values: Array, of: BoolArray) -> float:
        return float(np.log1p(values[of].max(initial=0.0)))

    every = np.ones(len(channels), dtype=bool)
    return np.array(
        [
            largest(spectra, dense),
            largest(tiles, dense),
            largest(winograd, dense),
            largest(copies, dense),
            largest(copies, pointwise),
            largest(copies, ~dense & ~pointwise),
            largest(channels, dense),
            largest(filters, dense),
            float(np.mean((channels % 4 != 0) | (filters % 4 != 0))),
            largest(inputs[:, 3] / inputs[:, 2], every),
        ]
    )
