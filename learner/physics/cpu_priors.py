"""Priors of step time and memory on CPUs: sums of terms of the kernels and the layers.

    time   = constant + calls * dispatch + FLOP / rate of the kind and pass
                      + FLOP of products that use the cores badly
                      + bytes of products, of reordered weights, of each kind of stream + update
    memory = process + tensors * live + products * (primitives of oneDNN)
                     + parameters * (Python objects of a layer) + blocked * (largest weights)

The kernels are those that GPUs launch (`profiler.traced_step`), which are loops over
tensors here. oneDNN copies weights into blocks of channels at every call. Pointwise convolutions of
few pixels, and depthwise ones of narrow images, leave most of the core's vectors empty. Blocks that
the C library does not keep come back from the system page by page. oneDNN keeps a primitive for
each shape of a product, and a layer with parameters has objects in Python and small allocations.

The constants of another CPU (for step time: a part of them) are the start of a fit, not the mean of
its prior. That was better than a prior around them or cross-validation. Both formulas were chosen
on 228 configurations on each of two and one thread of two hosts (docs/research/accuracy.md).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import numpy as np
from torch import Tensor

from trappm.learner.interface import Array, Workload, cache_on_first
from trappm.learner.physics.graph_prior import FORWARD_SHARE, PRODUCTS, settings_and_operators
from trappm.learner.physics.memory import MemoryPrior, amp_factor, step_memory
from trappm.learner.physics.prior import OPERATORS, PriorSpec, TermPrior
from trappm.learner.physics.step_time import PRODUCT_KINDS
from trappm.profiler.devices.catalogue import CPU
from trappm.profiler.errors import InputError
from trappm.profiler.graphs.nodes import BYTES_PER_ELEMENT
from trappm.profiler.memory.simulation import MIB
from trappm.profiler.records import Phase
from trappm.profiler.traced_step import KernelKind, Pass, Size

# The reference core: round numbers that labels correct.
MS_PER_STEP = 1.0
MS_PER_CALL = 0.02
MS_PER_UPDATE = 0.01
"""Time per parameter tensor."""
MS_PER_FLOP = 1e3 / 50e9
MS_PER_BYTE = 1e3 / 10e9
SCATTERED = 10.0
"""Slowdown of grouped and depthwise convolutions against the peak."""
MS_PER_NARROW_TAP = MS_PER_FLOP * SCATTERED * 10.0
"""Time per row of an image, channel (or group) and element of the window: equal to five more
pixels."""
FEW_ROWS = 8.0
"""Pixels of a batch at which a pointwise convolution reaches half of its speed."""
LARGE_BYTES = 2**25
"""Size above which glibc returns blocks to the system at once (mallopt(3), M_MMAP_THRESHOLD)."""
MS_PER_FRESH_BYTE = 1e3 / 1e9
"""Time per byte of memory that the system clears first."""

SHARED = 0.25
"""Share of a source's deviations from its mean constant that another CPU starts from."""

STREAM_GROUPS = {
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
_MULTIPLY = tuple(KernelKind)[:PRODUCT_KINDS]
_SCATTERED = (KernelKind.GROUPED, KernelKind.DEPTHWISE)

# A spread of 0.6 is a factor of two, as in `graph_prior` for kernels of one kind.
TIME_SPEC = PriorSpec(
    {
        "step": 1.5,
        "forward calls": 0.7,
        "backward calls": 0.7,
        "forward convolutions": 0.7,
        "backward convolutions": 0.7,
        "updates": 1.0,
        **{
            f"{kind.name.lower()} {direction}": 0.6
            for kind in _MULTIPLY
            for direction in ("forward", "backward")
        },
        "narrow forward": 0.8,
        "narrow backward": 0.8,
        "few rows": 0.8,
        "product bytes": 0.7,
        "reordered weights": 0.7,
        "large weights": 0.8,
        **{f"{name} bytes": 0.6 for name in STREAM_GROUPS},
        "optimizer bytes": 0.7,
    },
    common_spread=3.0,
)

# Starting values: round numbers that labels correct.
PRIMITIVE_MIB = 0.3
"""Memory per shape of a product: forward and both gradients."""
LAYER_MIB = 0.04

MEMORY_SPEC = PriorSpec(
    {
        "process": 1.0,
        "tensors": 0.05,  # bytes are bytes
        "products": 0.5,
        "parameters": 0.5,
        "blocked": 0.5,
    },
    common_spread=0.05,
)


class CpuPrior(TermPrior):
    """Prior with the constants of a reference CPU."""

    SPEC: ClassVar[PriorSpec]
    transfer_tightness = 1.0

    def __init__(self, log_constants: Array | None = None) -> None:
        super().__init__(self.SPEC, log_constants)

    @staticmethod
    @abstractmethod
    def terms_of(workload: Workload) -> list[float]:
        """Return the terms of one workload in the metric's unit, in the order of `SPEC`."""

    def terms(self, workloads: Sequence[Workload]) -> Array:
        rows = [self.terms_of(workload) for workload in workloads]
        return np.array(rows, dtype=np.float64).reshape(len(workloads), len(self.SPEC.spreads))

    def with_constants(self, log_constants: Array) -> Self:
        return type(self)(log_constants)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        return cls(tensors["log_constants"].numpy())


class CpuTimePrior(CpuPrior):
    """Prior of the step time on CPUs."""

    SPEC = TIME_SPEC
    feature_groups = (4, len(TIME_SPEC.spreads), len(OPERATORS), 5)

    @staticmethod
    @cache_on_first
    def terms_of(workload: Workload) -> list[float]:
        """Return the terms in ms on the reference core (31).

        Raises:
            InputError: A workload without kernels.
        """
        step = workload.kernels
        if step is None:
            raise InputError("a workload without kernels has no simulated step time")
        kernels = step.at(workload.batch_size)
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
            MS_PER_UPDATE * (step.parameter_tensors if updates else 0),
            *products,
            MS_PER_NARROW_TAP * float(narrow[forward].sum()),
            MS_PER_NARROW_TAP * float(narrow[of_images & ~forward].sum()),
            MS_PER_FLOP * FEW_ROWS * float(few_rows.sum()),
            MS_PER_BYTE * float(bytes_[table.kinds < PRODUCT_KINDS].sum()),
            MS_PER_BYTE * passes * float(weight_bytes[of_weights].sum()),
            MS_PER_FRESH_BYTE * passes * float(weight_bytes[large].sum()),
            *(
                MS_PER_BYTE * float(bytes_[np.isin(table.kinds, k)].sum())
                for k in STREAM_GROUPS.values()
            ),
            MS_PER_BYTE * (step.parameters * workload.optimizer.bytes_per_update() * updates),
        ]

    def started_from(self, other: Self) -> Self:
        """Return the prior with the mean constant of another CPU and a quarter of the deviations.

        Larger shares were worse than 0 on other numbers of threads (docs/research/accuracy.md).
        """
        speed = other.log_constants.mean()
        return self.with_constants(speed + SHARED * (other.log_constants - speed))

    def features_of(self, workloads: Sequence[Workload], logs: Array, shares: Array) -> Array:
        """Return size, shares of the terms and operators, and the configuration (n, f)."""
        return settings_and_operators(workloads, logs, shares)


class CpuMemoryPrior(CpuPrior):
    """Prior of the memory on CPUs."""

    SPEC = MEMORY_SPEC
    feature_groups = MemoryPrior.feature_groups

    @staticmethod
    @cache_on_first
    def terms_of(workload: Workload) -> list[float]:
        """Return the terms in MiB (5)."""
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
        """Return the features of `MemoryPrior` with this prior's size (n, f)."""
        del shares
        features = MemoryPrior.on(CPU).features(workloads)
        features[:, 0] = logs
        return features
