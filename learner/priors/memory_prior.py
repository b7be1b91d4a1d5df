"""What memory a step needs before anything is learned: its simulated allocations, five constants.

    memory = process + tensors * live + fragments * (reserved - live)
                     + scratch * (scratch memory of convolutions) + between * (kept gradients)

The sizes come from a training step replayed through CUDA's allocator, or, where none could be
traced, from rules on the graph (`step_memory`). On a card that is simulated well, all
constants but the last are 1 and no label is needed; on a CPU they start from a small process
without segments (`device_specs`), and labels move them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
import numpy.typing as npt
from torch import Tensor

from learner.priors.device_specs import UNKNOWN_GPU, DeviceSpec
from learner.priors.physics import PriorSpec, TermSpec
from learner.priors.step_memory import (
    CONVOLUTION_KINDS,
    SCRATCH_KINDS,
    StepMemory,
    amp_factor,
    step_memory,
)
from learner.priors.term_prior import TermPrior
from learner.residuals.graph_features import (
    CONVOLUTION_FEATURES,
    OPERATORS,
    convolution_scratch,
    operator_shares,
)
from learner.workload import Workload
from profiler.records import MemoryFormat, Phase, Precision

Array = npt.NDArray[np.float64]

SPEC = PriorSpec(
    (
        TermSpec("process", 0.7),  # more with more libraries loaded
        TermSpec("tensors", 0.05),  # bytes are bytes
        TermSpec("fragments", 0.4),  # from the allocator's rules, which a CPU does not have
        TermSpec("scratch", 0.5),  # cuDNN's choices, fitted on other labels
        TermSpec("between", 2.0),  # what the loop keeps from step to step, which nobody tells us
    ),
    common_spread=0.05,
)
BETWEEN = 0.1
"""Our protocol frees gradients between steps; published loops keep them, or momenta."""

FEATURE_GROUPS = (
    6,
    len(SPEC.terms),
    2 * SCRATCH_KINDS,
    2 * CONVOLUTION_KINDS,
    7,
    len(OPERATORS),
    CONVOLUTION_FEATURES,
)


class MemoryPrior(TermPrior):
    """The formula with its constants; see `learner.priors.prior.Prior`."""

    feature_groups = FEATURE_GROUPS

    def __init__(self, log_constants: Array | None = None) -> None:
        super().__init__(SPEC, log_constants)

    @classmethod
    def on(cls, device: DeviceSpec) -> Self:
        """Where the constants start from on this device."""
        found = np.zeros(len(SPEC.terms))
        found[0] = np.log(device.process_mib / UNKNOWN_GPU.process_mib)
        found[2] = np.log(device.fragments)
        return cls(found)

    def with_constants(self, log_constants: Array) -> Self:
        return type(self)(log_constants)

    def terms(self, workloads: Sequence[Workload]) -> Array:
        return _terms(workloads)

    def features(self, workloads: Sequence[Workload]) -> Array:
        """Size, the terms' shares, what scratch memory could do, and what the peak is made of."""
        rows = [
            _features(workload, step_memory(workload), shares, size)
            for workload, shares, size in zip(
                workloads, self.shares(workloads), self.log_values(workloads), strict=True
            )
        ]
        return np.array(rows, dtype=np.float64).reshape(len(workloads), sum(FEATURE_GROUPS))

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        return cls(tensors["log_constants"].numpy())


def _terms(workloads: Sequence[Workload]) -> Array:
    """The terms of each workload in MiB (n, 5)."""
    rows = []
    for workload in workloads:
        memory = step_memory(workload)
        factor = amp_factor(workload, memory)
        rows.append(
            [
                UNKNOWN_GPU.process_mib,
                factor * memory.live_mib,
                factor * memory.fragments_mib,
                factor * memory.scratch_mib,
                BETWEEN * memory.between_mib,
            ]
        )
    return np.array(rows, dtype=np.float64).reshape(len(workloads), len(SPEC.terms))


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
        memory.between_mib / memory.live_mib,
        memory.scratch_mib / memory.live_mib,
        memory.largest,
        memory.kept,
        memory.peak_at,
        memory.small,
        *operator_shares(graph),
        *convolution_scratch(graph),
    ]
