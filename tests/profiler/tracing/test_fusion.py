"""Fused kernels of compiled steps, by small modules whose fusion follows from inductor's rules."""

import numpy as np
import pytest
import torch
from small_modules import Function
from torch import nn

from trappm.profiler.records import Execution, MemoryFormat, Phase, Precision
from trappm.profiler.trace import trace
from trappm.profiler.traced_step import KernelKind, Size, TraceSettings
from trappm.profiler.tracing.fusion import prefers_channels_last

SIZE, BATCH = 8, 4
IMAGES = BATCH * 16 * SIZE * SIZE * 4
"""Bytes of 16 channels of all images in fp32."""


def kernels(model, phase=Phase.INFER, **options):
    settings = TraceSettings(execution=Execution.COMPILE, **options)
    return trace(model, SIZE, settings, phase).kernels.table


def of_kind(table, *kinds):
    """Return bytes read and written by each run of the kernels of these kinds."""
    rows = np.flatnonzero(np.isin(table.kinds, kinds))
    sizes = table.sizes_at(BATCH).astype(int)
    return [
        (int(sizes[i, Size.READ_BYTES]), int(sizes[i, Size.WRITTEN_BYTES]))
        for i in rows
        for _ in range(int(table.counts[i]))
    ]


def convolution(channels=3):
    return nn.Conv2d(channels, 16, 1, bias=False)


def test_what_follows_a_convolution_is_one_kernel():
    model = nn.Sequential(convolution(), nn.BatchNorm2d(16), nn.ReLU(), nn.Hardswish())
    ((read, written),) = of_kind(kernels(model), KernelKind.ELEMENTWISE)
    assert written == IMAGES
    assert read == IMAGES + 4 * 16 * 4  # and four numbers per channel


def test_a_layer_norm_takes_in_its_neighbors():
    model = nn.Sequential(
        convolution(), nn.Flatten(), nn.ReLU(), nn.LayerNorm(16 * SIZE * SIZE), nn.GELU(),
        nn.Linear(16 * SIZE * SIZE, 2),
    )  # fmt: skip
    table = kernels(model, precision=Precision.AMP_FP16)
    ((read, written),) = of_kind(table, KernelKind.LAYER_NORM)
    assert written == IMAGES // 2  # in 16 bits, as the product reads it
    assert read == IMAGES // 2 + 2 * 16 * SIZE * SIZE * 4


@pytest.mark.parametrize(
    ("layout", "count"), [(MemoryFormat.CONTIGUOUS, 1), (MemoryFormat.CHANNELS_LAST, 2)]
)
def test_a_mean_of_pixels_is_fused_only_where_they_are_the_inner_axis(layout, count):
    # Mostly grouped operations, so inductor keeps the layout.
    mean = Function(
        lambda self, images: torch.relu(self.grouped(self.convolution(images))).mean((2, 3)),
        convolution=nn.Conv2d(3, 96, 3, groups=3, bias=False),
        grouped=nn.Conv2d(96, 96, 3, groups=2, bias=False),
    )
    table = kernels(mean, memory_format=layout)
    fused = of_kind(table, KernelKind.ELEMENTWISE, KernelKind.REDUCTION)
    assert len(fused) == count


def test_the_backward_pass_computes_pointwise_results_again():
    model = nn.Sequential(convolution(), nn.GELU(), nn.Hardswish(), convolution(16))
    eager = trace(model, SIZE).kernels.table
    fused = kernels(model, Phase.TRAIN)
    assert fused.counts.sum() < eager.counts.sum()
    backward = fused.passes > 0
    pointwise = backward & (fused.kinds == KernelKind.ELEMENTWISE)
    read = fused.sizes_at(BATCH)[pointwise, Size.READ_BYTES].max()
    assert read == 2 * IMAGES  # the gradient and the convolution's result, not the GELU's


def test_inductor_chooses_the_layout_by_its_convolutions():
    def prefers(model, phase=Phase.INFER):
        return prefers_channels_last(trace(model, 64, phase=phase).kernels.table, phase)

    assert prefers("resnet10t")
    groups = [nn.Conv2d(width, 64, 3, groups=4) for width in (16, 64)]
    grouped = nn.Sequential(convolution(), *groups)
    assert not prefers(grouped, Phase.TRAIN)
    assert not prefers(nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, 2)))
