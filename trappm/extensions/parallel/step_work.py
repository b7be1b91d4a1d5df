"""Work of a training step: times of its passes, ready times of its gradients, and its blocks.

The durations of a traced step are those of its kernels. Ready times of gradients follow from the
order of the trace: each gradient is matched to the kernel that writes the same number of bytes, and
the remaining backward time is distributed by allocated bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from trappm.learner.interface import Workload
from trappm.learner.physics.prior import UPDATE_SHARE
from trappm.learner.physics.step_time import (
    PRODUCT_KINDS,
    SHARPNESS,
    Lookup,
    StepTimePrior,
    terms_of,
    times_of,
)
from trappm.profiler.errors import UnsupportedModelError
from trappm.profiler.traced_step import Allocations, Event, KernelKind, KernelTable, Pass, Size

HOOKS_MS = 5.5
"""Host time of FSDP's hooks per block, forward and backward, where most parameters are frozen: the
geometric mean of litgpt's LoRA of three models on 2 and 4 A100s, 2.6 to 8.8 ms
(docs/research/step_time.md)."""
HOOKS_RANGE = 2.0
"""Factor of these hooks, both ways, in the 90 % interval."""
MOST_FROZEN = 0.5
"""Share of trained parameters below which these hooks count."""
READ_AND_WRITTEN = 2
"""Bytes moved per copied byte: one read and one write."""


@dataclass(frozen=True)
class Gradient:
    """Gradient of a parameter."""

    size_bytes: float
    ready: float
    """Share of the backward pass after which the gradient is complete."""


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """A training step on one GPU."""

    forward_ms: float
    backward_ms: float
    update_ms: float
    """Time of the optimizer to read and write parameters and states, divided by sharding."""
    gradients: tuple[Gradient, ...]
    fixed_ms: float = 0.0
    """Other time per step that is the same on each rank: launches, host, input."""
    copy_ms: float = 0.0
    """Time to copy all parameters once within the device, as FSDP does around collectives."""
    blocks_bytes: tuple[float, ...] = ()
    """Parameters of each repeated block, in order; FSDP gathers one block at a time."""
    root_bytes: float = 0.0
    """Parameters outside of blocks, which FSDP gathers once per step."""
    trained_share: float = 1.0
    """Share of the parameters in blocks and root that have gradients."""
    host_ms: float = 0.0
    """Time of the host in a forward and backward pass, which overlaps with the device's."""
    hooks_ms: float = 0.0
    """Time of the host that FSDP adds to a forward and backward pass."""
    contention: float = 0.0
    """Slowdown of compute by FSDP and all other overhead of sharding, as a share of the time of
    overlapped collectives; 0 if not measured."""

    @property
    def step_ms(self) -> float:
        return self.forward_ms + self.backward_ms + self.update_ms + self.fixed_ms

    @property
    def gradient_bytes(self) -> float:
        return sum(gradient.size_bytes for gradient in self.gradients)

    def lasting(self, step_ms: float) -> StepWork:
        """Return the step scaled to a total time."""
        factor = step_ms / self.step_ms
        return replace(
            self,
            forward_ms=self.forward_ms * factor,
            backward_ms=self.backward_ms * factor,
            update_ms=self.update_ms * factor,
            fixed_ms=self.fixed_ms * factor,
            copy_ms=self.copy_ms * factor,
            host_ms=self.host_ms * factor,
        )

    def with_host_ms(self, more_ms: float) -> StepWork:
        """Return the step with a longer host time of each forward and backward pass."""
        passes_ms = self.forward_ms + self.backward_ms
        device_ms = max(passes_ms**SHARPNESS - self.host_ms**SHARPNESS, 0.0) ** (1 / SHARPNESS)
        host_ms = self.host_ms + more_ms
        longer_ms = (device_ms**SHARPNESS + host_ms**SHARPNESS) ** (1 / SHARPNESS)
        factor = longer_ms / passes_ms
        return replace(
            self,
            forward_ms=self.forward_ms * factor,
            backward_ms=self.backward_ms * factor,
            host_ms=host_ms,
        )


def even_work(
    step_ms: float, gradient_bytes: float, *, update: float = UPDATE_SHARE, blocks: int = 50
) -> StepWork:
    """Return a step with equal blocks, for a model of which only time and gradient size are known.

    The backward pass is assumed to take twice as long as the forward pass.
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
    """Return the work of a traced workload with times from a device's prior.

    Raises:
        UnsupportedModelError: The step was not traced.
    """
    trace = workload.trace
    if trace is None or trace.allocations is None or workload.kernels is None:
        raise UnsupportedModelError("the step could not be traced, so scaling is unknown")
    kernels, allocations = workload.kernels, trace.allocations
    terms = terms_of([workload], prior.spec)
    with torch.no_grad():
        times = times_of(terms, Lookup(prior.constants), prior.spec)
    table = kernels.table
    each_ms = np.zeros(len(table))
    products = np.isin(table.kinds, list(KernelKind)[:PRODUCT_KINDS])
    each_ms[products], each_ms[~products] = times.products.numpy(), times.streams.numpy()
    forward = table.passes == Pass.FORWARD
    total_ms, passes_ms, device_ms, once_ms = (
        float(each[0]) for each in (times.total(), times.passes(), times.device, times.step)
    )
    # Passes that wait for their host are slowed uniformly, and a shorter update of a step that
    # waits does not shorten it.
    factor = passes_ms / float(each_ms.sum())
    waiting_ms = total_ms - once_ms - device_ms
    update_ms = min(max(float(times.updating[0]) - waiting_ms, 0.0), total_ms - passes_ms)
    blocks, root, trained_share = gathered_blocks(allocations)
    return StepWork(
        forward_ms=float(each_ms[forward].sum()) * factor,
        backward_ms=float(each_ms[~forward].sum()) * factor,
        update_ms=update_ms,
        fixed_ms=total_ms - passes_ms - update_ms,
        copy_ms=READ_AND_WRITTEN * (sum(blocks) + root) / (prior.spec.bandwidth_gbs * 1e6),
        gradients=gradients_of(allocations, kernels.table, each_ms, workload.batch_size),
        blocks_bytes=tuple(blocks),
        root_bytes=root,
        trained_share=trained_share,
        host_ms=float(times.host[0] - times.host_optimizer[0]),
        hooks_ms=HOOKS_MS * len(blocks) if trained_share < MOST_FROZEN else 0.0,
    )


def gradients_of(
    allocations: Allocations, table: KernelTable, each_ms: np.ndarray, batch_size: int
) -> tuple[Gradient, ...]:
    """Return the gradients in order of completion; `each_ms` are times by kernel row, (k,)."""
    sizes = allocations.sizes_at(batch_size)
    backward = np.arange(len(allocations.kinds)) > allocations.end_of_forward
    born = allocations.kinds == Event.ALLOCATE
    own_ms = _weight_kernels(table, each_ms, batch_size)
    gradients = np.isin(allocations.blocks, allocations.gradients)
    spread = np.where(backward & born & ~gradients, sizes, 0).astype(float)
    total_ms = float(each_ms[table.passes != Pass.FORWARD].sum())
    weights = np.zeros(len(spread))
    for event in np.flatnonzero(backward & born & gradients).tolist():
        weights[event] = own_ms.get(int(sizes[event]), 0.0)
    rest_ms = max(total_ms - float(weights.sum()), 0.0)
    if spread.sum():
        weights += spread / spread.sum() * rest_ms
    progress = np.cumsum(weights) / max(float(weights.sum()), 1e-12)
    complete = np.sort(allocations.additions)
    return tuple(
        Gradient(float(sizes[event]), float(progress[event])) for event in complete.tolist()
    )


def _weight_kernels(table: KernelTable, each_ms: np.ndarray, batch_size: int) -> dict[int, float]:
    """Return the mean time of a weight gradient kernel by the number of bytes it writes."""
    written = table.sizes_at(batch_size)[:, Size.WRITTEN_BYTES].astype(np.int64)
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in np.flatnonzero(table.passes == Pass.WEIGHT_GRADIENT).tolist():
        # Under autocast the gradient is written in 16 bits and then cast.
        for size in (int(written[row]), 2 * int(written[row]))[: 1 + bool(table.half[row])]:
            sums[size][0] += float(each_ms[row])
            sums[size][1] += int(table.counts[row])
    return {size: total / count for size, (total, count) in sums.items()}


def gathered_blocks(allocations: Allocations) -> tuple[list[float], float, float]:
    """Return the bytes of each block and of the root that FSDP gathers, and the share that trains.

    Frozen parameters are among the buffers. Other buffers are small and count as such.
    """
    trained, frozen = allocations.parameter_bytes.tolist(), allocations.buffer_bytes.tolist()
    (blocks, root), (others, others_root) = blocks_of(trained), blocks_of(frozen)
    if len(others) == len(blocks):
        blocks = [block + other for block, other in zip(blocks, others, strict=True)]
    elif others:  # not by layer in one of both, whose bytes are divided like the other's
        most = max(blocks, others, key=sum)
        factor = (sum(blocks) + sum(others)) / sum(most)
        blocks = [factor * block for block in most]
    return blocks, root + others_root, sum(trained) / max(sum(trained) + sum(frozen), 1)


def blocks_of(parameter_bytes: Sequence[int]) -> tuple[list[float], float]:
    """Return the bytes of each repeated block of a model's parameters, and of the root.

    A block is a sequence of parameters whose sizes repeat immediately. Parameters between two
    repetitions also form a block (the first of a stage, with different sizes); parameters before
    the first or after the last block belong to the root.
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


MAX_PARAMETERS = 64
"""Largest number of parameters in a detected block; blocks of mixtures of experts have more."""
MIN_PARAMETERS = 4
"""Smallest number of parameters in a block; a repeated pair of weight and bias is not a block."""


def _longest_run(sizes: Sequence[int], start: int) -> tuple[int, int]:
    """Return period and count of the longest repetition from `start`; zeros if nothing repeats."""
    best = 0, 0
    for period in range(MIN_PARAMETERS, min(MAX_PARAMETERS, (len(sizes) - start) // 2) + 1):
        block, count = sizes[start : start + period], 1
        while sizes[start + count * period : start + (count + 1) * period] == block:
            count += 1
        if count > 1 and period * count > best[0] * best[1]:
            best = period, count
    return best
