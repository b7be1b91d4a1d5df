"""Traces of steps and graphs, and a model whose allocations can be counted by hand."""

from torch import nn

from trappm.profiler.errors import UnsupportedModelError
from trappm.profiler.models.model_input import Sample
from trappm.profiler.models.on_meta import on_meta
from trappm.profiler.records import Phase
from trappm.profiler.trace import trace
from trappm.profiler.tracing.tracer import Tracer


def trace_step(model, inputs, batch_sizes=(8, 32)):
    """Allocations of a training step, and the bytes that autograd keeps."""
    inputs = Sample.of(inputs) if isinstance(inputs, int) else inputs
    step = Tracer(model, inputs, batch_sizes=batch_sizes).trace()
    if step.allocations is None:
        raise UnsupportedModelError(step.refusal)
    return step.allocations, step.saved_bytes


def graph_of(model, inputs, phase=Phase.INFER, **options):
    """Graph of a forward pass, without which there is an error."""
    step = trace(model, inputs, phase=phase, **options)
    if step.graph is None:
        raise UnsupportedModelError(step.refusal)
    return step.graph


def meta(architecture, input_size=64):
    return on_meta(architecture, input_size)


class Tiny(nn.Module):
    """One convolution and one classifier."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.head = nn.Linear(8, 10, bias=False)

    def forward(self, x):
        return self.head(self.convolution(x).mean((2, 3)))


def tiny():
    return on_meta(Tiny(), 16)
