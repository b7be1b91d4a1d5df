"""The traced step against real ones on the CPU, and against what can be counted by hand."""

import numpy as np
import pytest
import torch
from small_modules import Function
from torch import nn
from traced_steps import Tiny, meta, tiny, trace_step

from trappm.profiler.errors import UnevenSizesError, UnsupportedModelError
from trappm.profiler.models.model_input import Sample
from trappm.profiler.models.on_meta import on_meta
from trappm.profiler.records import Phase
from trappm.profiler.trace import trace
from trappm.profiler.traced_step import Event
from trappm.profiler.tracing.tracer import Tracer


@pytest.mark.parametrize("architecture", ["test_resnet", "test_vit"])
def test_the_trace_between_two_batch_sizes_is_the_trace_at_that_one(architecture):
    model = meta(architecture)
    between = trace_step(model, 64)[0]
    direct = trace_step(model, 64, (16, 17))[0]
    np.testing.assert_array_equal(between.sizes_at(16), direct.sizes[:, 0])
    np.testing.assert_array_equal(between.blocks, direct.blocks)


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


def with_queue(self, x):
    y = torch.cat([self.head(x.flatten(1)), torch.zeros(100, 10, device=x.device)])
    return y @ y.t()


UNEVEN = {
    "pairs with a queue of samples": with_queue,
    "at least 64 samples": lambda self, x: (
        self.head(x.flatten(1)).repeat(64, 1)[: max(len(x), 64)].relu()
    ),
    "all pairs of samples": lambda self, x: self.head(x.flatten(1)) @ self.head(x.flatten(1)).t(),
    "every third sample": lambda self, x: self.head(x.flatten(1))[::3].relu(),
}
"""Steps with a tensor whose size is not affine in the batch size."""


@pytest.mark.parametrize(
    ("name", "phase"),
    [*((name, Phase.TRAIN) for name in UNEVEN), ("every third sample", Phase.INFER)],
)
def test_sizes_that_do_not_grow_evenly_are_refused_in_either_phase(name, phase):
    model = on_meta(Function(UNEVEN[name], head=nn.Linear(768, 10)), 16)
    with pytest.raises(UnevenSizesError, match="grow faster than the batch"):
        Tracer(model, Sample.of(16), phase=phase).trace()
    step = Tracer(model, Sample.of(16), phase=phase, batch_sizes=(12, 12)).trace()
    assert step.allocations.sizes_at(12).min() >= 0
    assert step.kernels.at(12).sizes.min() >= 0


def test_a_step_that_grows_unevenly_is_traced_at_the_batch_size_of_the_question():
    module = Function(UNEVEN["all pairs of samples"], head=nn.Linear(768, 10))
    with pytest.raises(UnevenSizesError):
        trace(module, 16)
    step = trace(module, 16, batch_size=12)
    assert step.batch_size == 12
    assert "grow faster than the batch" in step.only_because
