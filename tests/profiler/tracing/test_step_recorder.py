"""The traced step against real ones on the CPU, and against what can be counted by hand."""

import numpy as np
import pytest
import torch
from small_modules import Function
from traced_steps import Tiny, meta, tiny, trace_step

from trappm.profiler.errors import UnsupportedModelError
from trappm.profiler.models.on_meta import on_meta
from trappm.profiler.simulation.step_trace import Event


@pytest.mark.parametrize("architecture", ["test_resnet", "test_vit", "test_convnext", "resnet10t"])
def test_the_trace_between_two_batch_sizes_is_the_trace_at_that_one(architecture):
    model = meta(architecture)
    trace = trace_step(model, 64)[0]
    direct = trace_step(model, 64, (16, 17))[0]
    np.testing.assert_array_equal(trace.sizes_at(16), direct.sizes[:, 0])
    np.testing.assert_array_equal(trace.blocks, direct.blocks)


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
