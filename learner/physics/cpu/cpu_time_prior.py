"""How long a step takes on a CPU: a sum over the kernels of its trace, by kind and pass.

    step = constant + calls * dispatch + FLOP / rate of the kind and pass
                    + FLOP of products that use the cores badly
                    + bytes of products, of reordered weights, of each kind of stream + update

The kernels are those that GPUs launch (`profiler.simulation.kernel_profile`): a loop over tensors
here. What a GPU's formula says of launches, tiles and tensor cores does not hold, and few labels
could not teach its hundreds of constants. oneDNN copies weights into blocks of channels at every
call, which small batches wait for; a pointwise convolution of few pixels, and a depthwise one of
narrow images, leave most of the core's vectors empty; and what is too large for the C library to
keep comes back from the system page by page.

Chosen on 228 configurations on each of two and one thread of two hosts
(docs/studies/cpu_cores.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

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
MS_PER_NARROW_TAP = MS_PER_FLOP * SCATTERED * 10.0
"""Of a row of an image, for each of its channels (of a grouped one: groups) and of the window: as
much as five further pixels."""
FEW_ROWS = 8.0
"""Pixels of a whole batch of which a pointwise convolution is half as fast as of many."""
LARGE_BYTES = 2**25
"""Larger blocks glibc gives back to the system at once (mallopt(3), M_MMAP_THRESHOLD)."""
MS_PER_FRESH_BYTE = 1e3 / 1e9
"""Of memory that the system clears first."""

SHARED = 0.25
"""Of a source's constants beside their mean: how far its successor starts from the reference."""

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
_SCATTERED = (KernelKind.GROUPED, KernelKind.DEPTHWISE)

# A spread of 0.6 is a factor of two, as `graph_terms` has for kernels of one kind.
SPEC = PriorSpec(
    (
        TermSpec("step", 1.5),
        TermSpec("forward calls", 0.7),
        TermSpec("backward calls", 0.7),
        TermSpec("forward convolutions", 0.7),
        TermSpec("backward convolutions", 0.7),
        TermSpec("updates", 1.0),
        *(
            TermSpec(f"{kind.name.lower()} {direction}", 0.6)
            for kind in _MULTIPLY
            for direction in ("forward", "backward")
        ),
        TermSpec("narrow forward", 0.8),
        TermSpec("narrow backward", 0.8),
        TermSpec("few rows", 0.8),
        TermSpec("product bytes", 0.7),
        TermSpec("reordered weights", 0.7),
        TermSpec("large weights", 0.8),
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
        """In ms of the reference core (31).

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
        convolution = table.kinds <= KernelKind.DEPTHWISE
        bytes_ = counts * (sizes[:, Size.READ_BYTES] + sizes[:, Size.WRITTEN_BYTES])
        flops = counts * sizes[:, Size.FLOPS]
        # A convolution's or linear layer's weights, once forward and twice backward.
        weight = sizes[:, Size.COLUMNS] * sizes[:, Size.DEPTH] * sizes[:, Size.PRODUCTS]
        weight_bytes = BYTES_PER_ELEMENT * counts * weight
        of_weights = forward & (table.kinds <= KernelKind.LINEAR)
        large = of_weights & (BYTES_PER_ELEMENT * weight > LARGE_BYTES)
        trains = workload.phase is Phase.TRAIN
        products: list[float] = []
        for kind in _MULTIPLY:
            factor = SCATTERED if kind in _SCATTERED else 1.0
            of_kind = table.kinds == kind
            products += [
                MS_PER_FLOP * factor * float(flops[chosen].sum())
                for chosen in (of_kind & forward, of_kind & ~forward)
            ]
        rows = np.maximum(sizes[:, Size.ROWS], 1)
        taps = counts * rows * sizes[:, Size.PRODUCTS] * table.windows
        narrow = np.isin(table.kinds, _SCATTERED) * taps / np.sqrt(np.maximum(table.pixels, 1))
        of_images = table.passes != Pass.WEIGHT_GRADIENT
        few_rows = (of_images & (table.kinds == KernelKind.POINTWISE)) * flops / rows
        passes = 3 if trains else 1
        updates = trains and workload.scope.updates
        return [
            MS_PER_STEP,
            MS_PER_CALL * float(counts[forward].sum()),
            MS_PER_CALL * float(counts[~forward].sum()),
            MS_PER_CALL * float(counts[convolution & forward].sum()),
            MS_PER_CALL * float(counts[convolution & ~forward].sum()),
            MS_PER_UPDATE * (profile.parameter_tensors if updates else 0),
            *products,
            MS_PER_NARROW_TAP * float(narrow[forward].sum()),
            MS_PER_NARROW_TAP * float(narrow[of_images & ~forward].sum()),
            MS_PER_FLOP * FEW_ROWS * float(few_rows.sum()),
            MS_PER_BYTE * float(bytes_[table.kinds < PRODUCTS].sum()),
            MS_PER_BYTE * passes * float(weight_bytes[of_weights].sum()),
            MS_PER_FRESH_BYTE * passes * float(weight_bytes[large].sum()),
            *(MS_PER_BYTE * float(bytes_[np.isin(table.kinds, k)].sum()) for k in STREAMS.values()),
            MS_PER_BYTE * (profile.parameters * BYTES_PER_PARAMETER[workload.optimizer] * updates),
        ]

    def started_from(self, other: Self) -> Self:
        """The speed of another CPU, and a quarter of what sets its constants apart.

        More of it was worse than none on another number of threads (docs/studies/cpu_cores.md).
        """
        speed = other.log_constants.mean()
        return self.with_constants(speed + SHARED * (other.log_constants - speed))

    def features_of(self, workloads: Sequence[Workload], logs: Array, shares: Array) -> Array:
        """Size, the terms' shares, the operators' shares of the nodes, and the configuration."""
        return settings_and_operators(workloads, logs, shares)
