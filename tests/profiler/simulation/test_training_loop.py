"""The simulated training loop against what PyTorch's own allocates."""

from __future__ import annotations

import weakref
from dataclasses import fields
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trappm.profiler.simulation.memory_simulation import Allocator
from trappm.profiler.simulation.training_loop import Algorithm, Implementation, TrainingLoop

UNIT = 512
SHAPES = ((7,), (1000,), (33, 65), (), (129, 301), (3, 5, 7), (200, 100))
"""Odd sizes, each below what makes CUDA's norm sum in more than one chunk."""
BOTH = (False, True)
_LEARNING_RATE = 1e-3


def units(nbytes):
    return -(-nbytes // UNIT)


class Ledger(TorchDispatchMode):
    """Units of the storages that are born within: alive now, and at the peak.

    Numbers that `torch.tensor` makes are not seen, such as Adam's counters of steps: on CUDA these
    lie on the host.
    """

    def __init__(self):
        super().__init__()
        self.alive = self.peak = 0
        self._watchers = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        old = {
            t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)
        }
        output = func(*args, **(kwargs or {}))
        for tensor in filter(torch.is_tensor, tree_leaves(output)):
            storage = tensor.untyped_storage()
            if storage._cdata not in old | self._watchers.keys():
                self._born(storage)
        return output

    def _born(self, storage):
        key, size = storage._cdata, units(storage.nbytes())

        def died(_):
            del self._watchers[key]
            self.alive -= size

        self._watchers[key] = weakref.ref(storage, died)
        self.alive += size
        self.peak = max(self.peak, self.alive)


def make_optimizer(parameters, loop):
    decay = 0.01 if loop.weight_decay else 0.0
    make = {
        Algorithm.SGD: torch.optim.SGD,
        Algorithm.MOMENTUM: partial(torch.optim.SGD, momentum=0.9),
        Algorithm.ADAM: torch.optim.Adam,
        Algorithm.ADAMW: torch.optim.AdamW,
    }[loop.optimizer]
    forms = {
        "foreach": loop.implementation is Implementation.FOREACH,
        "fused": loop.implementation is Implementation.FUSED,
    }
    return make(parameters, lr=_LEARNING_RATE, weight_decay=decay, **forms)


def name_of(loop):
    """For the test's name."""
    switches = {f.name: getattr(loop, f.name) for f in fields(loop)}
    return "-".join(
        name if value is True else str(value)
        for name, value in switches.items()
        if value is not False
    )


LOOPS = [
    TrainingLoop(
        optimizer=optimizer,
        implementation=implementation,
        weight_decay=weight_decay,
        clip_gradients=clip,
        gradient_scaler=scaler,
    )
    for optimizer, implementation, weight_decay, clip, scaler in product(
        Algorithm, Implementation, BOTH, BOTH, BOTH
    )
]


@pytest.mark.parametrize("loop", LOOPS, ids=name_of)
def test_what_follows_the_backward_pass_allocates_as_in_pytorch(loop):
    """Peak, and what is left, in units of 512 bytes: of the first step, and of the second."""
    parameters = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    everything = [*parameters, nn.Parameter(torch.ones(50))]  # the last gets no gradient
    optimizer = make_optimizer(everything, loop)
    scaler = torch.amp.GradScaler("cpu", enabled=loop.gradient_scaler)
    loss, memory = torch.ones(()), Allocator()
    sizes = [units(p.untyped_storage().nbytes()) for p in parameters]
    with Ledger() as ledger:
        for first in (True, False):
            ledger.peak, memory.peak_live = ledger.alive, memory.live
            scaler.scale(loss)
            if loop.clip_gradients:
                scaler.unscale_(optimizer)
                clip_grad_norm_(everything, 1.0, foreach=True)
            scaler.step(optimizer)
            scaler.update()
            loop.update(memory, sizes, first=first)
            assert (memory.live, memory.peak_live) == (ledger.alive, ledger.peak)
