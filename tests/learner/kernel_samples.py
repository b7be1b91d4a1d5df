"""Workloads of made-up kernels, without a model."""

from dataclasses import replace

import numpy as np
import torch

from trappm.learner.interface import Workload
from trappm.learner.physics.step_time import StepTimePrior, group_rows
from trappm.profiler.records import Graph, MemoryFormat, Phase, Precision
from trappm.profiler.traced_step import KernelKind, KernelTable, Pass, Size, StepKernels


def table(rows):
    """Of (kind, pass, bytes per sample, rows per sample, columns, depth)."""
    sizes = np.zeros((len(rows), len(Size), 2), dtype=np.int64)
    for i, (kind, which, size, high, columns, depth) in enumerate(rows):
        sizes[i, Size.READ_BYTES] = sizes[i, Size.WRITTEN_BYTES] = 0, size // 2
        if kind <= KernelKind.ATTENTION:
            across, along = (Size.DEPTH, Size.ROWS)
            if which != Pass.WEIGHT_GRADIENT:
                across, along = along, across
            sizes[i, across], sizes[i, along] = (0, high), (depth, 0)
            sizes[i, Size.COLUMNS], sizes[i, Size.PRODUCTS] = (columns, 0), (1, 0)
            sizes[i, Size.FLOPS] = 0, 2 * high * columns * depth
    ones = np.ones(len(rows), dtype=np.int32)
    return KernelTable(
        kinds=np.array([r[0] for r in rows], dtype=np.int8),
        passes=np.array([r[1] for r in rows], dtype=np.int8),
        counts=ones,
        half=np.ones(len(rows), dtype=np.bool_),
        channels_last=np.zeros(len(rows), dtype=np.bool_),
        sizes=sizes,
        windows=ones,
        strides=ones,
        pixels=ones * 196,
    )


def workload(rows, batch_size=32, parameters=10**6):
    kernels = StepKernels(
        table=table(rows),
        parameter_tensors=20,
        parameters=parameters,
        precision=Precision.AMP_FP16,
        memory_format=MemoryFormat.CONTIGUOUS,
    )
    return Workload(graph=Graph.empty(batch_size), precision=Precision.AMP_FP16, kernels=kernels)


def inference(workload):
    """The forward pass of a training step."""
    rows = workload.kernels.table
    forward = rows.passes == Pass.FORWARD
    columns = {name: column[forward] for name, column in vars(rows).items()}
    kernels = replace(workload.kernels, table=KernelTable(**columns))
    return replace(workload, phase=Phase.INFER, kernels=kernels)


def network(random):
    """A network of made-up widths: convolutions, products, norms and activations."""
    rows = []
    for _ in range(int(random.integers(4, 20))):
        kind = random.choice([KernelKind.POINTWISE, KernelKind.LINEAR, KernelKind.DENSE])
        high, columns, depth = 196, *(8 * random.integers(2, 100, 2)).tolist()
        size = 2 * high * (columns + depth)
        rows += [(kind, which, size, high, columns, depth) for which in Pass]
        other = random.choice([KernelKind.BATCH_NORM, KernelKind.ELEMENTWISE, KernelKind.COPY])
        rows += [(other, w, 4 * high * columns, 0, 0, 0) for w in (Pass.FORWARD, Pass(1))]
    batch_size = int(random.choice([16, 64, 256]))
    return workload(rows, batch_size, int(random.integers(10**5, 10**8)))


def networks(count, seed=0):
    random = np.random.default_rng(seed)
    return [network(random) for _ in range(count)]


ROWS = {group.name: rows for group, rows in group_rows()}
"""Constants of each group of the step-time prior."""


def moved(prior, seed, spread=0.3):
    """Another device of the same kind."""
    random = torch.from_numpy(np.random.default_rng(seed).normal(size=len(prior.constants)))
    return StepTimePrior(prior.spec, prior.constants + spread * random)


def error(prior, workloads, truth):
    return float(np.mean(np.abs(prior.log_values(workloads) - truth)))
