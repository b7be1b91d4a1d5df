"""What memory a step needs on a CPU: live tensors, and what libraries keep for every layer.

    memory = process + tensors * live + products * (primitives of oneDNN)
                     + parameters * (Python's side of a layer) + blocked * (largest weights)

oneDNN makes a primitive, with machine code of its own, for each shape of a product and keeps it. It
copies weights into blocks of channels before it multiplies: the largest copy stands beside the
peak. A layer with parameters has objects in Python, a gradient and small allocations that glibc
rounds up. There are no segments of CUDA's allocator and no workspaces of cuDNN.

Chosen on 228 configurations on each of two and one thread (docs/studies/cpu_cores.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trappm.learner.physics.cpu.cpu_prior import CpuPrior
from trappm.learner.physics.device_specs import CPU
from trappm.learner.physics.graph_terms import PRODUCTS, PriorSpec, TermSpec
from trappm.learner.physics.memory_prior import MemoryPrior
from trappm.learner.physics.step_memory import amp_factor, step_memory
from trappm.learner.workload import Workload
from trappm.profiler.graphs.nodes import BYTES_PER_ELEMENT
from trappm.profiler.records import Phase

Array = npt.NDArray[np.float64]

MIB = 2.0**20
# Where the constants begin: round numbers, which labels move.
PRIMITIVE_MIB = 0.3
"""Of a product's shape: forward and both gradients."""
LAYER_MIB = 0.04
FORWARD_SHARE = 1 / 3
"""Inference has neither gradient; nobody has labelled it yet."""

SPEC = PriorSpec(
    (
        TermSpec("process", 1.0),
        TermSpec("tensors", 0.05),  # bytes are bytes
        TermSpec("products", 0.5),
        TermSpec("parameters", 0.5),
        TermSpec("blocked", 0.5),
    ),
    common_spread=0.05,
)


class CpuMemoryPrior(CpuPrior):
    """The formula with its constants; see `learner.physics.prior.Prior`."""

    SPEC = SPEC
    feature_groups = MemoryPrior.feature_groups

    @staticmethod
    def terms_of(workload: Workload) -> list[float]:
        """In MiB (5)."""
        graph = workload.graph
        multiplies = np.isin(graph.operators, list(PRODUCTS))
        shapes = np.column_stack(
            [
                graph.input_shapes[multiplies],
                graph.output_shapes[multiplies],
                graph.macs[multiplies],
                graph.parameters[multiplies],
            ]
        )
        largest = graph.parameters[multiplies].max(initial=0)
        memory = step_memory(workload)
        passes = FORWARD_SHARE if workload.phase is Phase.INFER else 1.0
        return [
            CPU.process_mib,
            amp_factor(workload, memory) * memory.live_mib,
            passes * PRIMITIVE_MIB * len(np.unique(shapes, axis=0)),
            passes * LAYER_MIB * np.count_nonzero(graph.parameters),
            BYTES_PER_ELEMENT * float(largest) / MIB,
        ]

    def features_of(self, workloads: Sequence[Workload], logs: Array, shares: Array) -> Array:
        """Those of the simulated step, and this prior's size in place of a GPU's."""
        del shares
        features = MemoryPrior.on(CPU).features(workloads)
        features[:, 0] = logs
        return features
