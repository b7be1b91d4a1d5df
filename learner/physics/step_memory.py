"""The memory of a step from its allocations: peaks, and what makes them uncertain.

The peaks are simulated (`profiler.memory.replay`). A few numbers describe the curve of live bytes:
how far scratch memory of each kind of convolution would lift the peak (cuDNN's choice of algorithm,
which no trace knows), how large single tensors are (fragmentation), and what the peak is made of. A
replay takes milliseconds, so its result is cached as long as its trace.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trappm.learner.workload import Array, Workload, cached_with_first
from trappm.profiler.graphs.nodes import BYTES_PER_ELEMENT, VIEWS
from trappm.profiler.memory.allocator import MIB
from trappm.profiler.memory.replay import memory_of
from trappm.profiler.memory.training_loop import Loop
from trappm.profiler.records import Graph, Optimizer, Phase, Precision
from trappm.profiler.records.allocations import ConvolutionKind, Event, Pass
from trappm.profiler.records.trace import Trace

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


def step_memory(workload: Workload, loop: Loop = Loop.PLAIN) -> StepMemory:
    """Return the simulated memory of the step, or an fp32 estimate from the graph."""
    if workload.trace is not None:
        return _simulated(workload.trace, workload.batch_size, workload.optimizer, loop)
    if workload.phase is Phase.INFER:
        return _forward_only(workload.graph)
    return _of_untraced(workload.graph, workload.optimizer, loop)


def amp_factor(workload: Workload, memory: StepMemory) -> float:
    """Return the factor of the precision on memory that was estimated in fp32."""
    if workload.precision is Precision.FP32 or workload.trace is not None:
        return 1.0
    weights = min(memory.weights_mib / memory.live_mib, 1.0)
    return weights + AMP_SHARE * (1.0 - weights)


@cached_with_first
def _simulated(trace: Trace, batch_size: int, optimizer: Optimizer, loop: Loop) -> StepMemory:
    peaks, events = memory_of(trace, batch_size, optimizer, loop), trace.allocations
    assert events is not None  # noqa: S101  (a workload has no other traces)
    sizes = events.sizes_at(batch_size).astype(np.float64)
    born, died = (events.kinds == kind for kind in (Event.ALLOCATE, Event.FREE))
    blocks = sizes[born]
    change = np.where(born, sizes, 0.0)
    change[died] = -blocks[events.blocks[died]]
    parameters, buffers = (float(s.sum()) for s in (events.parameter_bytes, events.buffer_bytes))
    weights = (
        parameters * (1 + loop.with_optimizer(optimizer).optimizer.states_per_parameter) + buffers
    )
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


@cached_with_first
def _of_untraced(graph: Graph, optimizer: Optimizer, loop: Loop) -> StepMemory:
    """A guess: weights, states and gradients, and a share of all results, kept for the backward."""
    outputs = graph.memory_bytes - BYTES_PER_ELEMENT * graph.parameters
    kept = KEPT_SHARE * float(outputs[[name not in VIEWS for name in graph.operators]].sum())
    parameters = BYTES_PER_ELEMENT * float(graph.parameters.sum())
    weights = parameters * (1 + loop.with_optimizer(optimizer).optimizer.states_per_parameter)
    return _of_graph(graph, (weights + parameters + kept) / MIB, weights / MIB)


@cached_with_first
def _forward_only(graph: Graph) -> StepMemory:
    """A forward pass without gradients: each tensor lives until its last reader has run."""
    outputs = (graph.memory_bytes - BYTES_PER_ELEMENT * graph.parameters).astype(np.float64)
    last = np.arange(graph.node_count)
    np.maximum.at(last, graph.edges[:, 0], graph.edges[:, 1])
    change = np.zeros(graph.node_count + 1)
    change[:-1] += outputs
    np.subtract.at(change, last + 1, outputs)
    weights = BYTES_PER_ELEMENT * float(graph.parameters.sum())
    live = weights + float(np.cumsum(change).max(initial=0.0))
    return _of_graph(graph, live / MIB, weights / MIB)


def _of_graph(graph: Graph, live_mib: float, weights_mib: float) -> StepMemory:
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
