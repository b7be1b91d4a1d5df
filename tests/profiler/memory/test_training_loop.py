"""The simulated training loop against what PyTorch's own allocates."""

import weakref
from dataclasses import replace
from functools import cache, partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from small_modules import Function
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trappm.prediction.question import loop_of
from trappm.profiler.errors import InputError
from trappm.profiler.memory.simulation import (
    MIB,
    Allocator,
    Implementation,
    ParameterGroup,
    TrainingLoop,
    simulate_memory,
)
from trappm.profiler.models.model_input import Sample
from trappm.profiler.records import Optimizer
from trappm.profiler.tracing.tracer import Tracer

UNIT = 512
WIDTH = 301
SHAPES = ((7,), (1000,), (33, 65), (), (129, 301), (3, 5, 7), (200, 100))
"""Odd sizes, each below what makes CUDA's norm sum in more than one chunk."""


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
        Optimizer.SGD: torch.optim.SGD,
        Optimizer.MOMENTUM: partial(torch.optim.SGD, momentum=0.9),
        Optimizer.ADAM: torch.optim.Adam,
        Optimizer.ADAMW: torch.optim.AdamW,
    }[loop.optimizer]
    return make(
        parameters, lr=1e-3, weight_decay=decay,
        foreach=loop.implementation is Implementation.FOREACH,
        fused=loop.implementation is Implementation.FUSED,
    )  # fmt: skip


TORCH_OPTIMIZERS = [kind for kind in Optimizer if kind is not Optimizer.ADAMW_8BIT]


KINDS = list(product(TORCH_OPTIMIZERS, Implementation))


@pytest.mark.parametrize(("optimizer", "implementation"), KINDS, ids=str)
def test_optimizer_steps_with_decay_allocate_as_in_pytorch(optimizer, implementation):
    parameters = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    loop = TrainingLoop(optimizer=optimizer, implementation=implementation, weight_decay=True)
    check_steps(make_optimizer(parameters, loop), loop, parameters)


def check_steps(optimizer, loop, parameters, earlier=0):
    """Peak and what is left of the first step and of the second, against the real optimizer.

    Units of `earlier` are those of tensors that exist before the real steps.
    """
    memory, sizes = Allocator(), [p.untyped_storage().nbytes() for p in parameters]
    places, widths = range(len(sizes)), [p.element_size() for p in parameters]
    with Ledger() as ledger:
        for first in (True, False):
            ledger.peak, memory.peak_live = ledger.alive, memory.live
            optimizer.step()
            loop.update(memory, sizes, places, widths, first=first)
            assert (memory.live, memory.peak_live) == (
                ledger.alive + earlier,
                ledger.peak + earlier,
            )


LIMIT = ((4095,), (4096,), (4097,), (129, 301), (7,))
"""Sizes around the least that bitsandbytes keeps in 8 bits."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_8_bit_states_are_those_of_bitsandbytes(dtype):
    """Bytes that bitsandbytes 0.50.2 kept of each parameter, and of its two maps."""
    sizes = [torch.empty(shape, dtype=dtype).nbytes for shape in LIMIT]
    kept = [
        2 * 4 * 4095, 2 * (4096 + 4 * 16), 2 * (4097 + 4 * 17), 2 * (38_829 + 4 * 152), 2 * 4 * 7
    ]  # fmt: skip
    loop = TrainingLoop(optimizer=Optimizer.ADAMW_8BIT)
    for size, expected in zip(sizes, kept, strict=True):
        assert loop.state_bytes([size], [0], [dtype.itemsize]) == 2 * 1024 + expected


def adamw_8bit(**given):
    """An object of a class with the name of bitsandbytes' one, which need not be installed."""
    kind = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": "bitsandbytes.optim.adamw"})
    made = kind([nn.Parameter(torch.ones(3))])
    vars(made).update(given)
    return made


def test_8_bit_optimizers_are_known_by_their_class():
    assert loop_of(adamw_8bit()) == loop_of(type(adamw_8bit())) == loop_of("adamw-8bit")
    with pytest.raises(InputError, match="paged"):
        loop_of(adamw_8bit(is_paged=True))
    with pytest.raises(InputError, match="min_8bit_size=16"):
        loop_of(adamw_8bit(args=SimpleNamespace(min_8bit_size=16)))
    with pytest.raises(InputError, match="one implementation"):
        TrainingLoop(optimizer=Optimizer.ADAMW_8BIT, implementation=Implementation.FUSED)


def residual():
    """Odd widths, a weight that is used twice, a sum of two paths, and a parameter without use."""

    def body(self, x):
        x = self.first(x)
        x = x + self.tied(torch.relu(self.tied(x)))
        return self.last(self.norm(x))

    return Function(
        body, first=nn.Linear(WIDTH, 403), tied=nn.Linear(403, 403, bias=False),
        norm=nn.LayerNorm(403), last=nn.Linear(403, 257), unused=nn.Parameter(torch.empty(1001)),
    )  # fmt: skip


def loss_of(output, inputs):
    return output.square().sum(1).square().mean()


def peak_units(run):
    """Peak of what PyTorch's CPU allocator hands out while this runs, as its profiler saw it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        nbytes = event.nbytes()
        alive += units(nbytes) if nbytes > 0 else -units(-nbytes)
        peak = max(peak, alive)
    return peak


def train(model, batch_size, loop):
    """Two steps."""
    optimizer = make_optimizer(model.parameters(), loop)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=loop.set_to_none)
        for _ in range(loop.accumulation_steps):
            loss = loss_of(model(torch.ones(batch_size, WIDTH)), None)
            loss.backward()
            del loss
        optimizer.step()


@cache
def residual_trace():
    with torch.device("meta"):
        model = residual()
    inputs = Sample((WIDTH,), torch.float32)
    return Tracer(model, inputs, loss=loss_of).trace().allocations


@pytest.mark.parametrize(("accumulation_steps", "set_to_none"), [(1, True), (2, False)])
@pytest.mark.parametrize(("optimizer", "implementation"), KINDS, ids=str)
def test_simulated_peaks_agree_with_pytorch(
    optimizer, implementation, accumulation_steps, set_to_none
):
    """At a small batch and a large one, in units of 512 bytes, on the CPU's own allocator.

    In addition to what CUDA allocates, a CPU has Adam's counters of steps, and one or two numbers
    where it has no kernel for all parameters at once.
    """
    loop = TrainingLoop(
        optimizer=optimizer,
        implementation=implementation,
        accumulation_steps=accumulation_steps,
        set_to_none=set_to_none,
        weight_decay=accumulation_steps == 2,
    )
    for batch_size in (3, 700):
        model = residual()
        weights = sum(units(p.untyped_storage().nbytes()) for p in model.parameters())
        simulated = simulate_memory(residual_trace(), batch_size, loop).live_mib * MIB / UNIT
        counted = loop.optimizer.is_adam and loop.implementation is not Implementation.FUSED
        more = weights + peak_units(partial(train, model, batch_size, loop)) - simulated
        counters = counted * sum(p.grad is not None for p in model.parameters())
        assert 0 <= more - counters <= 2


def test_groups_of_an_optimizer_allocate_as_in_pytorch():
    """Some have a momentum, some a decay, some are in no group; of the first and second step."""
    parameters = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD(
        [
            {"params": parameters[:2], "momentum": 0.9},
            {"params": parameters[3:5], "weight_decay": 0.1, "foreach": False},
            {"params": [*parameters[5:6], nn.Parameter(torch.ones(50))], "fused": True,
             "momentum": 0.9, "foreach": False},
        ],
        lr=0.1, foreach=True,
    )  # fmt: skip
    kinds = (
        {"optimizer": Optimizer.MOMENTUM, "places": (0, 1)},
        {"optimizer": Optimizer.SGD, "implementation": Implementation.PLAIN, "weight_decay": True,
         "places": (3, 4)},
        {"optimizer": Optimizer.MOMENTUM, "implementation": Implementation.FUSED, "places": (5, 9)},
    )  # fmt: skip
    loop = TrainingLoop(groups=tuple(ParameterGroup(**kind) for kind in kinds))
    check_steps(optimizer, loop, parameters)
    places = range(len(SHAPES))
    assert loop.kept_gradients(places) == [2, 6]
    assert replace(loop, set_to_none=False).kept_gradients(places) == [*places]
    assert loop.state_bytes([1] * len(places), places, [1] * len(places)) == 3
