"""Modules that nobody wrote for TraPPM: what is answered about them, against real steps."""

from functools import cache
from unittest import mock

import numpy as np
import pytest
import torch
from foreign_layers import LanguageModel
from foreign_modules import BATCH_SIZE, BY_NAME, MODULES, NO_TRANSFORMERS, TRANSFORMERS
from simulated_steps import simulated, trace_of
from small_modules import Function, Parts
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from trappm.profiler.errors import UnsupportedModelError
from trappm.profiler.models.model_input import ExampleInputs
from trappm.profiler.models.on_meta import on_meta
from trappm.profiler.traced_step import Event, Size, TraceSettings
from trappm.profiler.tracing import losses, step_recorder
from trappm.profiler.tracing.allocation_log import AllocationLog
from trappm.profiler.tracing.gpu import attention
from trappm.profiler.tracing.known_values import AS_IN_THE_EXAMPLE
from trappm.profiler.tracing.losses import default_loss
from trappm.profiler.tracing.tensors import tensors_of
from trappm.profiler.tracing.tracer import Tracer


def params(chosen):
    """The modules as parameters of a test, with the marks of each."""
    return [
        pytest.param(
            foreign,
            id=foreign.name,
            marks=pytest.mark.skipif(
                "Hugging Face" in foreign.name and not TRANSFORMERS, reason=NO_TRANSFORMERS
            ),
        )
        for foreign in chosen
    ]


COMPARED = [foreign for foreign in MODULES if not foreign.cpu_differs]


def estimate(foreign, **options):
    args, kwargs = foreign.call()
    return simulated(
        foreign.build(), *args, loss=foreign.loss, **{**foreign.estimate, **kwargs, **options}
    )


@cache
def traced(name, batch_sizes=(8, 32), *, fused_attention=True):
    foreign = BY_NAME[name]
    args, kwargs = foreign.call()
    if foreign.by_values:
        batch_sizes = (batch_of(foreign), batch_of(foreign))
    loss = default_loss if foreign.loss is None else lambda output, _: foreign.loss(output)
    original = foreign.build()
    return Tracer(
        on_meta(original, None),
        ExampleInputs.of(*args, **kwargs),
        TraceSettings(fused_attention=fused_attention),
        batch_sizes=batch_sizes,
        loss=loss,
        original=original if foreign.by_values else None,
    ).trace()


def in_new_memory(args, last):
    """Replace `_accumulates`; a mock would keep its arguments alive."""
    return False


@cache
def traced_as_on_the_cpu(name):
    """Trace with fused attention in every type, and without gradients added in place.

    A CPU's fused attention works as flash attention does. Under a dispatch mode the engine adds
    gradients into new memory.
    """
    with (
        mock.patch.object(attention, "_runs_flash", lambda query, value, mask: query.dim() == 4),
        mock.patch.object(step_recorder, "_accumulates", in_new_memory),
    ):
        return traced.__wrapped__(name)


def batch_of(foreign):
    """Entries of the first axis of the inputs: of the graph network these are nodes."""
    args, kwargs = foreign.call()
    return ExampleInputs.of(*args, **kwargs).batch_size


def real_loss(foreign, output, inputs):
    """Of a real step, whose target classes are not on the meta device."""
    with mock.patch.object(losses, "_classes", lambda count: torch.zeros(count, dtype=torch.long)):
        return foreign.loss(output) if foreign.loss else default_loss(output, inputs)


def kept_on_the_cpu(foreign):
    """Bytes of all storages that a real forward pass keeps, weights and buffers aside."""
    model, (args, kwargs) = foreign.build().train(), foreign.call()
    present = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in present and storage.nbytes():
            kept[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(*args, **kwargs)
    assert output is not None  # and so is alive
    return sum(nbytes for storage, nbytes in kept.values() if not storage.expired())


@pytest.mark.parametrize("foreign", params(COMPARED))
def test_what_autograd_keeps_is_what_a_real_step_keeps_at_a_batch_size_never_traced(foreign):
    saved_bytes = traced_as_on_the_cpu(foreign.name).saved_bytes
    assert saved_bytes.at(batch_of(foreign)) == kept_on_the_cpu(foreign)


def real_flops(foreign):
    """Return the operations of both passes of a real step."""
    model, inputs = foreign.build().train(), foreign.call()
    args, kwargs = inputs
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        loss = real_loss(foreign, model(*args, **kwargs), inputs)
        loss.backward()
    return counted.get_total_flops()


@pytest.mark.parametrize("foreign", params(f for f in MODULES if not f.is_recurrent))
def test_the_kernels_compute_what_pytorch_counts(foreign):
    table = traced(foreign.name, fused_attention=False).kernels.table
    flops = table.sizes[:, Size.FLOPS] @ np.array([1, batch_of(foreign)]) * table.counts
    assert flops.sum() == real_flops(foreign)


class _Watch(TorchDispatchMode):
    """Logs the storages of real tensors."""

    def __init__(self, log):
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in tensors_of((output,)):
            self.log.see(tensor)
        return output


@cache
def real_events(name):
    """Births and deaths of the storages of a real step (E, 3)."""
    foreign = BY_NAME[name]
    model, inputs = foreign.build().train(), foreign.call()
    args, kwargs = inputs
    log = AllocationLog((*model.parameters(), *model.buffers()))
    for tensor in tree_leaves(inputs):
        if isinstance(tensor, torch.Tensor):
            log.see(tensor)
    with _Watch(log):
        loss = real_loss(foreign, model(*args, **kwargs), inputs)
        log.end_forward()
        loss.backward()
        del loss
    log.closed = True
    return log.events()


def traced_events(name):
    step = traced_as_on_the_cpu(name).allocations
    sizes = step.sizes_at(batch_of(BY_NAME[name]))
    events = np.stack([step.kinds, step.blocks, sizes], axis=1)
    return events[np.isin(step.kinds, (Event.ALLOCATE, Event.FREE, Event.END_OF_FORWARD))]


def peak(events):
    signs = np.select([events[:, 0] == Event.ALLOCATE, events[:, 0] == Event.FREE], [1, -1], 0)
    return int(np.cumsum(signs * events[:, 2]).max())


IN_ORDER = (
    "GAN step: generator through discriminator, two backward passes",
    "torch.utils.checkpoint, reentrant",
    "frozen backbone",
    "3-D convolutions",
    "message passing over edges (index_add)",
    "parameters in bf16",
)
"""Modules whose storages are also born and freed in the order of a real step."""


@pytest.mark.parametrize(
    "foreign",
    params(f for f in COMPARED if not (f.peak_differs or f.has_fused_attention)),
)
def test_live_memory_peaks_where_that_of_a_real_step_does(foreign):
    """Not where fused attention decides the peak: its backward pass is another on a CPU."""
    traced, real = traced_events(foreign.name), real_events(foreign.name)
    assert peak(traced) == peak(real)
    if foreign.name in IN_ORDER:
        np.testing.assert_array_equal(traced, real)


@pytest.mark.parametrize("name", IN_ORDER[:2])
def test_gradients_meet_in_place_as_the_engine_adds_them(name, monkeypatch):
    foreign = BY_NAME[name]
    decided = []

    def deciding(args, last, decide=step_recorder._accumulates):
        decided.append(decide(args, last))
        return decided[-1]

    monkeypatch.setattr(step_recorder, "_accumulates", deciding)
    traced.__wrapped__(name, (4, 4))
    model, inputs = foreign.build().train(), foreign.call()
    loss = real_loss(foreign, model(*inputs[0], **inputs[1]), inputs)
    with torch.profiler.profile() as profiled:
        loss.backward()
    in_place = [event.name for event in profiled.events()].count("aten::add_")
    assert decided.count(True) == 2 * in_place
    assert in_place


@pytest.mark.parametrize("foreign", params(f for f in MODULES if f.needs_a_choice))
def test_a_module_is_answered_for_by_its_example_where_it_must_run(foreign):
    answer = estimate(foreign)
    assert answer.fits
    assert answer.memory_breakdown.total_mib == pytest.approx(answer.memory_mib, rel=0.02)


def test_a_recurrent_language_model_multiplies_as_cells_do():
    """But cuDNN computes the gradient of the first state, which nobody wants."""
    foreign = BY_NAME["LSTM language model"]
    table = traced(foreign.name).kernels.table
    flops = table.sizes[:, Size.FLOPS] @ np.array([1, BATCH_SIZE]) * table.counts
    with torch.backends.mkldnn.flags(enabled=False):
        both = real_flops(foreign)
    recurrent = LanguageModel(nn.LSTM).recurrent
    of_first_state = 2 * BATCH_SIZE * recurrent.weight_hh_l0.numel() * recurrent.num_layers
    assert flops.sum() - of_first_state == both


def masked(mask):
    """BERT with this mask; it makes none of one that hides nothing."""
    foreign = BY_NAME["Hugging Face BERT"]
    inputs = {**foreign.call()[1], "attention_mask": mask}
    return trace_of(simulated(foreign.build(), **inputs)).blocks.max()


@pytest.mark.skipif(not TRANSFORMERS, reason=NO_TRANSFORMERS)
def test_a_model_that_branches_on_a_mask_takes_the_branch_of_the_example():
    open_mask = torch.ones(BATCH_SIZE, 32, dtype=torch.long)
    padded = open_mask.clone()
    padded[0, 20:] = 0
    assert masked(padded) > masked(open_mask)
    with pytest.raises(UnsupportedModelError, match=r"masking_utils.py:\d+ needs the values"):
        masked(torch.empty(BATCH_SIZE, 32, dtype=torch.long, device="meta"))


class Asks(Parts):
    """Branches on what a function makes of its input."""

    def forward(self, x, numbers):
        return self.head(x) if self.ask(x, numbers) else self.head(-x)


def written_into(x, numbers):
    numbers = numbers + 0
    numbers[0] = (x[0, 0] > 0).long()
    return numbers[1] > 0


@pytest.mark.parametrize(
    ("ask", "is_known"),
    [
        (lambda x, numbers: (numbers > 0).all(), True),
        (lambda x, numbers: numbers.view(-1).add_(1).max() > 2, True),
        (lambda x, numbers: x.sum() > 0, False),
        (written_into, False),
    ],
)
def test_a_step_is_run_for_other_values_than_whole_numbers_of_constants_and_example(ask, is_known):
    inputs = torch.rand(2, 4), torch.tensor([1, 2])
    remarks = simulated(Asks(ask=ask, head=nn.Linear(4, 1)), *inputs).remarks
    assert (AS_IN_THE_EXAMPLE in " ".join(remarks)) != is_known


def grouped_attention(dtype):
    """Bytes that attention keeps whose 8 heads share the keys of 2."""

    def attention(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        return nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        ).transpose(1, 2)

    grouped = Function(attention, q=nn.Linear(64, 64), k=nn.Linear(64, 16), v=nn.Linear(64, 16))
    model = on_meta(grouped.to(dtype), None)
    inputs = ExampleInputs.of(torch.empty(2, 32, 64, dtype=dtype))
    step = Tracer(model, inputs).trace()
    return step.saved_bytes.at(8), step.kernels.table


def test_keys_of_grouped_queries_are_repeated_only_where_no_kernel_shares_them():
    tokens, halves = 8 * 32, 2
    flash, kernels = grouped_attention(torch.bfloat16)
    # The input, queries, the output, keys and values; one log-sum-exp in fp32 for each head.
    assert flash == tokens * halves * (3 * 64 + 2 * 16) + tokens * 8 * 4
    assert grouped_attention(torch.float32)[0] > 2 * flash
    causal = kernels.sizes[kernels.sizes[:, Size.PRODUCTS].sum(1) > 1]
    assert causal[:, Size.COLUMNS, 0].tolist() == [16, 16]  # half of 32 keys
