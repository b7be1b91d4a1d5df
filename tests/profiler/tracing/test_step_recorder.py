"""The traced step against real ones on the CPU, and against what can be counted by hand."""

import numpy as np
import pytest
import torch
from small_modules import Function
from torch import nn
from traced_steps import Tiny, meta, tiny, trace_step

from trappm.profiler.errors import UnsupportedModelError
from trappm.profiler.models.on_meta import on_meta
from trappm.profiler.simulation.step_trace import Event


def saved_at(model, input_size):
    return trace_step(on_meta(model, input_size), input_size)[1]


def test_the_allocations_of_a_tiny_step_are_those_counted_by_hand():
    trace = trace_step(tiny(), 16)[0]
    sizes = trace.sizes_at(8)[trace.kinds == Event.ALLOCATE].tolist()
    images, features, scores = 8 * 3 * 256 * 4, 8 * 8 * 256 * 4, 8 * 10 * 4
    assert sizes[0] == images
    assert sizes.count(features) >= 2  # the convolution's output, and its gradient
    assert scores in sizes
    assert trace.parameter_bytes.tolist() == [8 * 3 * 9 * 4, 10 * 8 * 4]
    allocated = trace.sizes_at(8)[trace.kinds == Event.ALLOCATE]
    gradient_sizes = sorted(
        int(trace.sizes_at(8)[(trace.kinds == Event.ALLOCATE) & (trace.blocks == block)][0])
        for block in trace.gradients
    )
    assert gradient_sizes == sorted(trace.parameter_bytes.tolist())
    assert allocated.min() > 0


@pytest.mark.parametrize("architecture", ["test_resnet", "test_vit", "test_convnext", "resnet10t"])
def test_the_trace_between_two_batch_sizes_is_the_trace_at_that_one(architecture):
    model = meta(architecture)
    trace = trace_step(model, 64)[0]
    direct = trace_step(model, 64, (16, 17))[0]
    np.testing.assert_array_equal(trace.sizes_at(16), direct.sizes[:, 0])
    np.testing.assert_array_equal(trace.blocks, direct.blocks)


def test_every_free_is_of_a_block_that_was_allocated_before():
    trace = trace_step(meta("test_vit"), 64)[0]
    alive: set[int] = set()
    for kind, block in zip(trace.kinds.tolist(), trace.blocks.tolist(), strict=True):
        if kind == Event.ALLOCATE:
            assert block not in alive
            alive.add(block)
        elif kind == Event.FREE:
            alive.remove(block)
    assert set(trace.gradients.tolist()) <= alive


def attention(self, x):
    q, k, v = (t[:, None] for t in self.qkv(x).flatten(2).transpose(1, 2).chunk(3, -1))
    return nn.functional.scaled_dot_product_attention(q, k, v)


def test_fused_attention_keeps_no_scores():
    pixels, size = 16 * 16, 8
    images, qkv, result, normaliser = (4 * pixels * width for width in (3, 3 * size, size, 1))
    saved = saved_at(Function(attention, qkv=nn.Conv2d(3, 3 * size, 1)), 16)
    assert saved.constant == 0
    assert saved.slope == images + qkv + result + normaliser
    three = Function(attention, qkv=nn.Conv2d(3, 9, 1))
    assert saved_at(three, 16).slope > 4 * pixels * pixels  # no kernel for three


def test_what_is_kept_grows_with_the_batch_only_where_it_should():
    weighted = Function(
        lambda self, x: x * self.weight.exp()[:, None, None], weight=nn.Parameter(torch.rand(3))
    )
    saved = saved_at(weighted, 4)
    assert saved.constant == 4 * 3  # the exponential
    assert saved.slope == 4 * 3 * 16  # the images


def test_a_model_that_cannot_be_traced_says_why():
    broken = Function(lambda _, x: x[x > 0])  # its shape depends on the pixels
    with pytest.raises(
        UnsupportedModelError, match=r"cannot be traced: .* needs the values of a tensor \(aten::"
    ):
        trace_step(broken, 16)


def test_what_a_model_keeps_from_its_first_step_is_not_taken_for_a_change_of_order():
    class Tabled(Tiny):
        table = None

        def forward(self, x):
            if self.table is None:
                self.table = torch.ones(16, 16, device=x.device) * 2
            return super().forward(x * self.table)

    kinds = trace_step(on_meta(Tabled(), 16), 16)[0].kinds.tolist()
    # The product, what it saves, and its gradient; the table itself is there before the step.
    assert kinds.count(Event.ALLOCATE) > trace_step(tiny(), 16)[0].kinds.tolist().count(0)


def test_a_step_whose_order_hangs_on_the_batch_is_refused():
    class Split(Tiny):
        def forward(self, x):
            return torch.cat([super(Split, self).forward(part) for part in x.split(8)])

    with pytest.raises(UnsupportedModelError, match="order of allocations changes"):
        trace_step(on_meta(Split(), 16), 16)
