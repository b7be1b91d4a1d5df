"""Memory prior of GPUs: simulated allocations of a step and four constants.

    memory = process + tensors * live + fragments * (reserved - live)
                     + scratch * (scratch memory of convolutions)

The sizes come from a training step replayed through CUDA's allocator. If no step could be traced,
`step_memory` estimates them from the graph. All constants are 1 for a card that the simulation
describes exactly. CPUs have their own formula (`cpu_priors`). Published labels do not name their
training loop, so the loop that explains them best is assumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor

from trappm.learner.physics.graph_prior import (
    CONVOLUTION_FEATURES,
    OPERATORS,
    convolution_scratch,
    operator_shares,
)
from trappm.learner.physics.prior import PriorSpec, TermPrior
from trappm.learner.physics.step_memory import (
    CONVOLUTION_KINDS,
    SCRATCH_KINDS,
    StepMemory,
    amp_factor,
    step_memory,
)
from trappm.learner.workload import Array, Workload
from trappm.profiler.devices.catalogue import CONTEXT_MIB, DeviceSpec
from trappm.profiler.memory.training_loop import Loop
from trappm.profiler.records import MemoryFormat, Phase, Precision

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

    def __init__(self, log_constants: Array | None = None, loop: Loop = Loop.PLAIN) -> None:
        super().__init__(SPEC, log_constants)
        self.loop = loop

    @classmethod
    def on(cls, device: DeviceSpec | None) -> Self:
        """The prior of a device before any label; None is a device without a data sheet."""
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

        def loss(loop: Loop) -> tuple[float, bool]:
            fitted = self._in(loop).fitted(labelled, values, None, tightness)
            errors = (fitted.log_values(labelled) - values) / TYPICAL_ERROR
            return float(np.log1p(errors**2 / 4.0).sum()), loop is not self.loop

        return self._in(min(Loop, key=loss))

    def _in(self, loop: Loop) -> Self:
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
        return cls(tensors["log_constants"].numpy(), list(Loop)[int(tensors["loop"])])

    def tensors(self) -> dict[str, Tensor]:
        return {**super().tensors(), "loop": torch.tensor(list(Loop).index(self.loop))}


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
        float(workload.precision is not Precision.FP32),
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
