"""The kernels of a step are those that a GPU would run: counts, bytes, operations, types."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from small_modules import Function, Parts
from torch import nn

from trappm.profiler.models.model_input import Sample
from trappm.profiler.models.on_meta import on_meta
from trappm.profiler.records import MemoryFormat, Phase, Precision
from trappm.profiler.trace import trace
from trappm.profiler.traced_step import TRACED_BATCH_SIZES, KernelKind, Pass, Size, TraceSettings
from trappm.profiler.tracing.tracer import Tracer


def tiny():
    """All of its kernels can be counted by hand."""
    return Function(
        lambda self, x: self.head(self.norm(self.convolution(x)).relu().mean((2, 3))),
        convolution=nn.Conv2d(3, 8, 3, padding=1, bias=False),
        norm=nn.BatchNorm2d(8),
        head=nn.Linear(8, 10),
    )


class Attention(Parts):
    def forward(self, x):
        tokens = self.stem(x).flatten(2).transpose(1, 2)
        parts = self.query_key_value(tokens).reshape(x.shape[0], -1, 3, 4, 8)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return mixed.transpose(1, 2).flatten(2).mean(1)


def step_kernels(model, input_size, phase=Phase.TRAIN, **settings):
    return trace(model, input_size, TraceSettings(**settings), phase).kernels


def rows(step, kind, which=None):
    """Count and sizes at batch size 4 of the kernels of this kind."""
    kernels = step.at(4)
    chosen = kernels.table.kinds == kind
    if which is not None:
        chosen &= kernels.table.passes == which
    return kernels.table.counts[chosen], kernels.sizes[chosen]


def total_flops(step, batch_size):
    kernels = step.at(batch_size)
    return float(kernels.table.counts @ kernels.sizes[:, Size.FLOPS])


def test_a_convolution_has_three_passes_but_no_gradient_of_the_images():
    step = step_kernels(tiny(), 16)
    flops = 2 * 4 * 256 * 8 * 27
    images, weight, result = 4 * 3 * 256 * 4, 8 * 27 * 4, 4 * 8 * 256 * 4
    counts, sizes = rows(step, KernelKind.DENSE, which=Pass.FORWARD)
    assert counts.tolist() == [1]
    expected = [images + weight, result, flops, 4 * 256, 8, 27, 1]
    assert sizes.tolist() == [expected]
    counts, sizes = rows(step, KernelKind.DENSE, which=Pass.WEIGHT_GRADIENT)
    assert sizes.tolist() == [[images + result, weight, flops, 8, 27, 4 * 256, 1]]
    assert not len(rows(step, KernelKind.DENSE, which=Pass.DATA_GRADIENT)[0])


def test_a_batch_norm_reads_twice_when_it_takes_statistics():
    trains, infers = (step_kernels(tiny(), 16, phase) for phase in Phase)
    images, vector = 4 * 8 * 256 * 4, 8 * 4
    _, sizes = rows(trains, KernelKind.BATCH_NORM, Pass.FORWARD)
    read, written = sizes[0, : Size.WRITTEN_BYTES + 1]
    assert 2 * images <= read <= 2 * images + 8 * vector
    assert images <= written <= images + 8 * vector
    _, sizes = rows(infers, KernelKind.BATCH_NORM)
    assert images <= sizes[0, Size.READ_BYTES] <= images + 8 * vector
    assert sizes[0, Size.COLUMNS] == 8


def test_autocast_computes_products_in_16_bits_and_casts_each_weight_once():
    model = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), nn.Conv2d(8, 8, 1, bias=False))
    model.append(model[1])  # the same weights again
    half = step_kernels(model, 8, Phase.INFER, precision=Precision.AMP_FP16)
    full = step_kernels(model, 8, Phase.INFER)
    for step, computes_in_half in ((half, True), (full, False)):
        chosen = step.table.kinds == KernelKind.POINTWISE
        assert step.table.half[chosen].all() == computes_in_half
    counts, sizes = rows(half, KernelKind.CAST)
    assert counts.sum() == 3  # the images, and two weights
    assert not len(rows(full, KernelKind.CAST)[0])
    images = 4 * 3 * 64
    assert sizes[:, Size.READ_BYTES].max() == images * 4
    assert sizes[:, Size.WRITTEN_BYTES].max() == images * 2


def test_attention_is_one_kernel_or_several_as_the_stack_has_it():
    model = Attention(stem=nn.Conv2d(3, 32, 4, 4), query_key_value=nn.Linear(32, 96))
    fused, apart = (
        {phase: step_kernels(model, 16, phase, fused_attention=is_fused) for phase in Phase}
        for is_fused in (True, False)
    )
    assert rows(fused[Phase.INFER], KernelKind.ATTENTION)[0].sum() == 1
    assert rows(fused[Phase.TRAIN], KernelKind.ATTENTION)[0].sum() == 2  # forward and backward
    assert not len(rows(fused[Phase.TRAIN], KernelKind.MATMUL)[0])
    assert rows(apart[Phase.INFER], KernelKind.MATMUL)[0].sum() == 2
    assert rows(apart[Phase.TRAIN], KernelKind.MATMUL)[0].sum() == 6
    assert rows(apart[Phase.INFER], KernelKind.SOFTMAX)[0].sum() == 1
    assert total_flops(fused[Phase.INFER], 4) == total_flops(apart[Phase.INFER], 4)


def test_channels_last_images_stay_so_and_mixed_layouts_are_copied():
    last = step_kernels(tiny(), 16, Phase.INFER, memory_format=MemoryFormat.CHANNELS_LAST).table
    assert last.channels_last[last.kinds == KernelKind.DENSE].all()
    assert not step_kernels(tiny(), 16, Phase.INFER).table.channels_last.any()

    crossed = Function(
        lambda self, x: self.second(self.first(x).transpose(2, 3)),
        first=nn.Conv2d(3, 8, 1),
        second=nn.Conv2d(8, 8, 1),
    )
    assert rows(step_kernels(crossed, 16, Phase.INFER), KernelKind.COPY)[0].sum() == 1


def recurrent(kind, **options):
    layer = kind(16, 8, batch_first=True, **options)
    return Function(lambda self, x: self.layer(x.mean(1))[0].mean(1), layer=layer)


def test_a_recurrent_layer_is_a_product_of_all_inputs_and_one_for_each_step():
    layer = recurrent(nn.LSTM, bidirectional=True)
    trains, infers = (step_kernels(layer, 16, phase) for phase in Phase)
    # For each direction one product of all inputs, and one more for each of the 16 steps.
    assert sorted(rows(infers, KernelKind.LINEAR)[0]) == [2, 2 * 16]
    of_weights = rows(trains, KernelKind.LINEAR, which=Pass.WEIGHT_GRADIENT)[0]
    assert of_weights.sum() == 4  # of all steps at once
    # Two directions, 16 steps, four gates.
    assert total_flops(infers, 4) == 2 * 2 * 16 * 4 * (16 + 8) * 4 * 8


def test_passes_of_products_are_known_at_one_batch_size():
    layers = [nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 5)]
    model, sizes = nn.Sequential(*layers), (TRACED_BATCH_SIZES, (4, 4))
    usual, one = (
        Tracer(on_meta(model, 8), Sample.of(8), batch_sizes=pair).trace().kernels for pair in sizes
    )
    for which in Pass:
        counts, sizes = rows(usual, KernelKind.LINEAR, which=which)
        same_counts, same_sizes = rows(one, KernelKind.LINEAR, which=which)
        assert sorted(map(tuple, sizes.tolist())) == sorted(map(tuple, same_sizes.tolist()))
        assert counts.sum() == same_counts.sum()


class Experts(nn.Module):
    """Four experts that share the pixels, as the groups of `grouped_mm`."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3, 8))

    def forward(self, x):
        pixels = x.permute(0, 2, 3, 1).reshape(-1, 3)
        ends = torch.arange(1, 5, dtype=torch.int32) * (len(pixels) // 4)
        mixed = F.grouped_mm(pixels * self.weight.sum(), self.weight, offs=ends)
        return mixed.reshape(len(x), -1)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_products_of_experts_are_those_of_all_tokens_once(precision):
    step = step_kernels(Experts(), 16, precision=precision)
    pixels = 4 * 16 * 16
    for which, shape in (
        (Pass.FORWARD, (pixels // 4, 8, 3)),
        (Pass.DATA_GRADIENT, (pixels // 4, 3, 8)),
        (Pass.WEIGHT_GRADIENT, (3, 8, pixels // 4)),
    ):
        _, (sizes,) = rows(step, KernelKind.LINEAR, which=which)
        assert sizes[Size.FLOPS] == 2 * pixels * 3 * 8
        assert tuple(sizes[[Size.ROWS, Size.COLUMNS, Size.DEPTH]]) == shape
        assert sizes[Size.PRODUCTS] == 4
