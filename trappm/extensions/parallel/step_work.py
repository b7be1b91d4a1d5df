"""A training step as strategies see it: how long its passes take, what is ready when, its blocks.

Of a traced step the durations are those of its kernels. When a gradient is ready follows from the
order of the trace: a gradient's own kernel is the one that writes as many bytes, and what else the
backward pass does is spread by the bytes that it allocates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from trappm.learner.physics.kernel_terms import PRODUCTS, terms_of
from trappm.learner.physics.kernel_times import Lookup, times_of
from trappm.learner.physics.step_time_prior import StepTimePrior
from trappm.learner.workload import Workload
from trappm.profiler.errors import UnsupportedModelError
from trappm.profiler.simulation.kernel_profile import KernelKind, KernelProfile, Pass, Size
from trappm.profiler.simulation.step_trace import Event, StepTrace

READ_AND_WRITTEN = 2
"""Bytes that a copy moves for each of its own."""


@dataclass(frozen=True)
class Gradient:
    """A parameter's gradient, in the order in which the backward pass completes them."""

    size_bytes: float
    ready: float
    """Share of the backward pass after which it is complete."""


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """A training step of one GPU."""

    forward_ms: float
    backward_ms: float
    update_ms: float
    """Of the optimizer, what reading and writing parameters and states takes: ranks that keep a
    share of them divide it."""
    gradients: tuple[Gradient, ...]
    fixed_ms: float = 0.0
    """What else is done once a step, and no rank has less of: launches, the host, input."""
    copy_ms: float = 0.0
    """Of copying all parameters once within the device, as FSDP does around its collectives."""
    blocks_bytes: tuple[float, ...] = ()
    """Parameters of each repeated block, in order; what FSDP gathers at once."""
    root_bytes: float = 0.0
    """Parameters outside of blocks, which FSDP gathers once a step."""
    boundary_bytes: float = 0.0
    """Size of a block's result, which tensor-parallel ranks sum."""
    divisible: float = 0.0
    """Share of the passes' time that tensor-parallel ranks divide."""
    heads: int = 0
    """Of attention in each block, which tensor-parallel ranks have whole; 0 where not known."""
    contention: float = 0.0
    """Share of FSDP's hidden collectives by which they slow what is computed beside them, and all
    else that sharding costs; 0 where no label says so."""

    @property
    def step_ms(self) -> float:
        return self.forward_ms + self.backward_ms + self.update_ms + self.fixed_ms

    @property
    def gradient_bytes(self) -> float:
        return sum(gradient.size_bytes for gradient in self.gradients)

    def lasting(self, step_ms: float) -> StepWork:
        """The same step where it takes so long as a whole, as labels have it."""
        factor = step_ms / self.step_ms
        return replace(
            self,
            forward_ms=self.forward_ms * factor,
            backward_ms=self.backward_ms * factor,
            update_ms=self.update_ms * factor,
            fixed_ms=self.fixed_ms * factor,
            copy_ms=self.copy_ms * factor,
        )


def even_work(
    step_ms: float, gradient_bytes: float, *, update: float = 0.03, blocks: int = 50
) -> StepWork:
    """A step of which nothing but its time and its gradients' size is known: equal blocks.

    The backward pass is taken for twice the forward pass, which it is in products.
    """
    passes = step_ms * (1 - update)
    return StepWork(
        forward_ms=passes / 3,
        backward_ms=passes * 2 / 3,
        update_ms=step_ms * update,
        gradients=tuple(
            Gradient(gradient_bytes / blocks, (place + 1) / blocks) for place in range(blocks)
        ),
        blocks_bytes=(gradient_bytes / blocks,) * blocks,
    )


def traced_work(workload: Workload, prior: StepTimePrior) -> StepWork:
    """The step of a workload that comes with its trace and kernels, by a device's prior.

    Raises:
        UnsupportedModelError: its step was not traced.
    """
    if workload.step is None or workload.kernels is None:
        raise UnsupportedModelError("its step could not be traced, so it cannot be shared")
    kernels, trace = workload.kernels, workload.step.trace
    terms = terms_of([workload], prior.spec)
    with torch.no_grad():
        times = times_of(terms, Lookup(prior.constants), prior.spec)
    table = kernels.train
    each_ms = np.zeros(len(table))
    products = np.isin(table.kinds, list(KernelKind)[:PRODUCTS])
    each_ms[products], each_ms[~products] = times.products.numpy(), times.streams.numpy()
    forward = table.passes == Pass.FORWARD
    total_ms, device_ms, once_ms = (
        float(each[0]) for each in (times.total(), times.device, times.step)
    )
    # A host that cannot keep up slows all down alike, and gains nothing from what it waits less.
    factor = (total_ms - once_ms) / device_ms
    waiting_ms = total_ms - once_ms - device_ms
    update_ms = max(float(times.updating[0]) - waiting_ms, 0.0)
    blocks, root = blocks_of(trace.parameter_bytes.tolist())
    hidden_bytes, tokens = _hidden(blocks, kernels, workload.batch_size)
    linear = np.isin(table.kinds, (KernelKind.LINEAR, KernelKind.MATMUL, KernelKind.ATTENTION))
    return StepWork(
        forward_ms=float(each_ms[forward].sum()) * factor,
        backward_ms=float(each_ms[~forward].sum()) * factor,
        update_ms=update_ms,
        fixed_ms=float(times.optimizer[0]) * factor + once_ms - update_ms,
        copy_ms=READ_AND_WRITTEN * sum(trace.parameter_bytes) / (prior.spec.bandwidth_gbs * 1e6),
        gradients=gradients_of(trace, kernels, each_ms, workload.batch_size),
        blocks_bytes=tuple(blocks),
        root_bytes=root,
        boundary_bytes=hidden_bytes * tokens,
        divisible=float(each_ms[linear].sum() / each_ms.sum()) if hidden_bytes else 0.0,
        heads=_heads(kernels),
    )


def gradients_of(
    trace: StepTrace, kernels: KernelProfile, each_ms: np.ndarray, batch_size: int
) -> tuple[Gradient, ...]:
    """The gradients in the order of their completion; `each_ms` is of the kernels of a row (k)."""
    table = kernels.train
    sizes = trace.sizes_at(batch_size)
    backward = np.arange(len(trace.kinds)) > trace.end_of_forward
    born = trace.kinds == Event.ALLOCATE
    own_ms = _weight_kernels(kernels, each_ms, batch_size)
    gradients = np.isin(trace.blocks, trace.gradients)
    spread = np.where(backward & born & ~gradients, sizes, 0).astype(float)
    total_ms = float(each_ms[table.passes != Pass.FORWARD].sum())
    weights = np.zeros(len(spread))
    for event in np.flatnonzero(backward & born & gradients).tolist():
        weights[event] = own_ms.get(int(sizes[event]), 0.0)
    rest_ms = max(total_ms - float(weights.sum()), 0.0)
    if spread.sum():
        weights += spread / spread.sum() * rest_ms
    progress = np.cumsum(weights) / max(float(weights.sum()), 1e-12)
    complete = trace.additions
    if not len(complete):  # traces of earlier versions do not say
        complete = np.flatnonzero(backward & born & gradients)
    complete = np.sort(complete)
    return tuple(
        Gradient(float(sizes[event]), float(progress[event])) for event in complete.tolist()
    )


def _weight_kernels(
    kernels: KernelProfile, each_ms: np.ndarray, batch_size: int
) -> dict[int, float]:
    """Time of a kernel that writes a weight's gradient, by the bytes that it writes."""
    table = kernels.train
    written = table.sizes_at(batch_size)[:, Size.WRITTEN_BYTES].astype(np.int64)
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in np.flatnonzero(table.passes == Pass.WEIGHT_GRADIENT).tolist():
        # In autocast it is written in 16 bits, and then cast.
        for size in (int(written[row]), 2 * int(written[row]))[: 1 + bool(table.half[row])]:
            sums[size][0] += float(each_ms[row])
            sums[size][1] += int(table.counts[row])
    return {size: total / count for size, (total, count) in sums.items()}


def blocks_of(parameter_bytes: Sequence[int]) -> tuple[list[float], float]:
    """Bytes of each repeated block among a model's parameters, and of what lies outside.

    A block is a run of parameters whose sizes come again right behind it. What stands between two
    runs is a block too (the first of a stage, with its other sizes); what is before the first or
    behind the last is the root's.
    """
    sizes, blocks, between = list(parameter_bytes), list[float](), list[int]()
    root, place, seen = 0.0, 0, False
    while place < len(sizes):
        period, count = _longest_run(sizes, place)
        if not period:
            between.append(sizes[place])
            place += 1
            continue
        if seen and between:
            blocks.append(float(sum(between)))
        elif between:
            root += sum(between)
        between, seen = [], True
        blocks += [float(sum(sizes[place : place + period]))] * count
        place += period * count
    return blocks, root + sum(between)


MOST_PARAMETERS = 64
"""Of a block, where repetitions are looked for; those of mixtures of experts have more."""
LEAST_PARAMETERS = 4
"""Of a block: a weight and its bias that come twice are no block."""


def _longest_run(sizes: Sequence[int], start: int) -> tuple[int, int]:
    """Length and number of the repetitions that cover most from here on; 0 where none do."""
    best = 0, 0
    for period in range(LEAST_PARAMETERS, min(MOST_PARAMETERS, (len(sizes) - start) // 2) + 1):
        block, count = sizes[start : start + period], 1
        while sizes[start + count * period : start + (count + 1) * period] == block:
            count += 1
        if count > 1 and period * count > best[0] * best[1]:
            best = period, count
    return best


def _heads(kernels: KernelProfile) -> int:
    """Of attention: the products of a sample at once, where all blocks have as many."""
    table = kernels.train
    attention = np.isin(table.kinds, (KernelKind.ATTENTION, KernelKind.MATMUL))
    heads = table.sizes[attention & (table.passes == Pass.FORWARD), Size.PRODUCTS, 1]
    return int(heads[0]) if len(set(heads.tolist())) == 1 else 0


def _hidden(
    blocks: Sequence[float], kernels: KernelProfile, batch_size: int
) -> tuple[float, float]:
    """Bytes of a token's state between equal blocks of linear layers, and tokens of a step.

    0 where the model has no such blocks: then no product can be shared by the usual plan.
    """
    table = kernels.train
    rows = (table.kinds == KernelKind.LINEAR) & (table.passes == Pass.FORWARD)
    sizes = table.sizes_at(batch_size)
    common = len(set(blocks)) == 1 and bool(rows.any())
    if not common:
        return 0.0, 0.0
    often = rows & (table.counts >= len(blocks))
    if not often.any():
        return 0.0, 0.0
    # Most of a block's products read its state; only the last of the perceptron reads a wider one.
    tokens = float(np.median(sizes[often, Size.ROWS]))
    width = float(np.median(np.repeat(sizes[often, Size.DEPTH], table.counts[often])))
    half = bool(table.half[often].all())
    return width * (2 if half else 4), tokens
