"""A trace survives its bytes, and nothing else passes for one."""

from dataclasses import fields

import numpy as np
import pytest
from small_modules import Function
from torch import nn

from trappm.profiler.errors import TrappmError
from trappm.profiler.files import pack, unpack
from trappm.profiler.memory.simulation import memory_of
from trappm.profiler.records import MemoryFormat, Optimizer, Phase, Precision
from trappm.profiler.trace import trace
from trappm.profiler.traced_step import Trace, TraceSettings

SETTINGS = TraceSettings(Precision.AMP_BF16, MemoryFormat.CHANNELS_LAST, fused_attention=False)


def tiny():
    model = Function(
        lambda self, x: self.head(self.norm(self.convolution(x)).relu().mean((2, 3))),
        convolution=nn.Conv2d(3, 8, 3, padding=1), norm=nn.BatchNorm2d(8), head=nn.Linear(8, 10),
    )  # fmt: skip
    model.convolution.bias.requires_grad_(False)
    return model


@pytest.fixture(scope="module")
def step():
    return trace(tiny(), 16)


def test_steps_count_the_parameters_that_the_optimizer_updates(step):
    assert step.kernels.parameters == 8 * 27 + 8 + 8 + 80 + 10
    assert step.kernels.parameter_tensors == 5
    assert trace(tiny(), 16, phase=Phase.INFER).kernels.parameters == 0


def test_elements_of_each_parameter_have_a_size():
    mixed = Function(
        lambda self, x: self.norm(self.head(x.flatten(1).bfloat16()).float()),
        head=nn.Linear(768, 10).bfloat16(), norm=nn.LayerNorm(10),
    )  # fmt: skip
    assert trace(mixed, 16).allocations.element_bytes.tolist() == [2, 2, 4, 4]


def test_traces_from_before_elements_had_sizes_are_read(step):
    arrays = unpack(step.to_bytes())
    del arrays["allocations.element_bytes"]
    again = Trace.from_bytes(pack(arrays))
    assert again.to_bytes() == step.to_bytes()


@pytest.mark.parametrize("phase", Phase)
def test_all_that_a_trace_has_is_read_back(phase):
    made = trace(tiny(), 16, SETTINGS, phase, with_origins=True)
    again = Trace.from_bytes(made.to_bytes())
    assert again.to_bytes() == made.to_bytes()
    assert again.graph.content_hash == made.graph.content_hash
    assert memory_of(again, 5, Optimizer.ADAM) == memory_of(made, 5, Optimizer.ADAM)
    for name in ("phase", "saved_bytes", "refusal", "only_because", "source", "remark"):
        assert getattr(again, name) == getattr(made, name)
    assert [*again.origins] == [*made.origins] != []
    for part in ("allocations", "kernels"):
        one, other = getattr(again, part), getattr(made, part)
        for name in (field.name for field in fields(one) if field.name != "table"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    for column in fields(made.kernels.table):
        pair = (getattr(one.kernels.table, column.name) for one in (again, made))
        np.testing.assert_array_equal(*pair)


def test_a_trace_without_a_step_has_its_graph_and_the_reason():
    class Untrained(nn.Module):
        """Its forward pass is a graph; there is nothing to train."""

        def forward(self, x):
            return x.relu()

    made = trace(Untrained(), 16)
    again = Trace.from_bytes(made.to_bytes())
    assert again.graph.operators == ("Relu",)
    assert again.allocations is again.kernels is None
    assert again.refusal == made.refusal == "no output depends on a trainable parameter"


def test_a_step_of_one_batch_size_is_refused_at_others():
    only = Function(lambda self, x: self.head(x.reshape(4, 768)), head=nn.Linear(768, 10))
    again = Trace.from_bytes(trace(only, 16, batch_size=4).to_bytes())
    assert again.batch_size == again.kernels.batch_size == 4
    assert again.only_because
    with pytest.raises(TrappmError, match="batch size 5"):
        again.kernels.at(5)


@pytest.mark.parametrize("end", [0, 0.5, 0.99])
def test_damaged_bytes_are_refused(step, end):
    data = step.to_bytes()
    with pytest.raises(TrappmError, match="damaged"):
        Trace.from_bytes(data[: int(end * len(data))])
