"""How long a step takes on a CPU: a sum over the kernels of its trace, by kind and pass.

    step = constant + calls * dispatch + FLOP / rate of the kind and pass
                    + bytes of products, of reordered weights, of each kind of stream + update

The kernels are those that GPUs launch (`profiler.simulation.kernel_profile`): a loop over tensors
here. What a GPU's formula says of launches, tiles and tensor cores does not hold, and few labels
could not teach its hundreds of constants. oneDNN copies weights into blocks of channels at every
call, which small batches wait for.

Chosen on 228 configurations on each of two and one thread (docs/accuracy.md, "CPU cores").
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trappm.learner.physics.cpu.cpu_prior import CpuPrior
from trappm.learner.physics.graph_prior import settings_and_operators
from trappm.learner.physics.graph_terms import PriorSpec, TermSpec
from trappm.learner.physics.kernel_terms import BYTES_PER_PARAMETER, PRODUCTS
from trappm.learner.residual.graph_features import OPERATORS
from trappm.learner.workload import Workload
from trappm.profiler.errors import InputError
from trappm.profiler.graphs.nodes import BYTES_PER_ELEMENT
from trappm.profiler.records import Phase
from trappm.profiler.simulation.kernel_profile import KernelKind, Pass, Size

Array = npt.NDArray[np.float64]

# The reference core: round numbers, which labels move.
MS_PER_STEP = 1.0
MS_PER_CALL = 0.02
MS_PER_UPDATE = 0.01
"""Of a parameter tensor."""
MS_PER_FLOP = 1e3 / 50e9
MS_PER_BYTE = 1e3 / 10e9
SCATTERED = 10.0
"""Grouped and depthwise convolutions reach this much less of the peak."""

STREAMS = {
    "norm": (KernelKind.BATCH_NORM, KernelKind.LAYER_NORM, KernelKind.SOFTMAX),
    "elementwise": (
        KernelKind.ELEMENTWISE,
        KernelKind.BROADCAST,
        KernelKind.FILL,
        KernelKind.CAST,
    ),
    "move": (KernelKind.STRIDED, KernelKind.COPY, KernelKind.INDEX, KernelKind.OTHER),
    "reduction": (KernelKind.REDUCTION, KernelKind.POOLING),
}
_MULTIPLY = tuple(KernelKind)[:PRODUCTS]

# A spread of 0.6 is a factor of two, as `graph_terms` has for kernels of one kind.
SPEC = PriorSpec(
    (
        TermSpec("step", 1.5),
        TermSpec("forward calls", 0.7),
        TermSpec("backward calls", 0.7),
        TermSpec("updates", 1.0),
        *(
            TermSpec(f"{kind.name.lower()} {direction}", 0.6)
            for kind in _MULTIPLY
            for direction in ("forward", "backward")
        ),
        TermSpec("product bytes", 0.7),
        TermSpec("reordered weights", 0.7),
        *(TermSpec(f"{name} bytes", 0.6) for name in STREAMS),
        TermSpec("optimizer bytes", 0.7),
    ),
    common_spread=3.0,
)


class CpuTimePrior(CpuPrior):
    """The formula with its constants; see `learner.physics.prior.Prior`."""

    SPEC = SPEC
    feature_groups = (4, len(SPEC.terms), len(OPERATORS), 5)

    @staticmethod
    def terms_of(workload: Workload) -> list[float]:
        """In ms of the reference core (25).

        Raises:
            InputError: a workload without kernels.
        """
        profile = workload.kernels
        if profile is None:
            raise InputError("a workload without kernels has no simulated step time")
        kernels = profile.at(workload.batch_size, workload.phase)
        table, sizes = kernels.table, kernels.sizes
        counts = table.counts.astype(np.float64)
        forward = table.passes == Pass.FORWARD
        bytes_ = counts * (sizes[:, Size.READ_BYTES] + sizes[:, Size.WRITTEN_BYTES])
        flops = counts * sizes[:, Size.FLOPS]
        # A convolution's or linear layer's weights, once forward and twice backward.
        weights = counts * sizes[:, Size.COLUMNS] * sizes[:, Size.DEPTH] * sizes[:, Size.PRODUCTS]
        of_weights = forward & (table.kinds <= KernelKind.LINEAR)
        trains = workload.phase is Phase.TRAIN
        products: list[float] = []
        for kind in _MULTIPLY:
            factor = SCATTERED if kind in (KernelKind.GROUPED, KernelKind.DEPTHWISE) else 1.0
            of_kind = table.kinds == kind
            products += [
                MS_PER_FLOP * factor * float(flops[chosen].sum())
                for chosen in (of_kind & forward, of_kind & ~forward)
            ]
        passes = 3 if trains else 1
        updates = trains and workload.scope.updates
        return [
            MS_PER_STEP,
            MS_PER_CALL * float(counts[forward].sum()),
            MS_PER_CALL * float(counts[~forward].sum()),
            MS_PER_UPDATE * (profile.parameter_tensors if updates else 0),
            *products,
            MS_PER_BYTE * float(bytes_[table.kinds < PRODUCTS].sum()),
            MS_PER_BYTE * BYTES_PER_ELEMENT * passes * float(weights[of_weights].sum()),
            *(MS_PER_BYTE * float(bytes_[np.isin(table.kinds, k)].sum()) for k in STREAMS.values()),
            MS_PER_BYTE * (profile.parameters * BYTES_PER_PARAMETER[workload.optimizer] * updates),
        ]

    def features(self, workloads: Sequence[Workload]) -> Array:
        """Size, the terms' shares, the operators' shares of the nodes, and the configuration."""
        return settings_and_operators(workloads, self.log_values(workloads), self.shares(workloads))
