"""Functions of a GPU on the meta device: attention, dropout, autocast, names of the GPU."""

import copy
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from small_modules import Function
from torch import nn

from trappm.profiler.errors import InputError
from trappm.profiler.models.model_input import Sample
from trappm.profiler.models.on_meta import on_meta
from trappm.profiler.records import Phase, Precision
from trappm.profiler.trace import trace
from trappm.profiler.traced_step import KernelKind, TraceSettings
from trappm.profiler.tracing.gpu.operators import result_of
from trappm.profiler.tracing.gpu.traced_gpu import TRACED_GPU
from trappm.profiler.tracing.gpu_functions import CAST, REFUSED, GpuFunctions
from trappm.profiler.tracing.kernel_log import KernelLog
from trappm.profiler.tracing.tracer import Tracer

TOKENS = torch.empty(2, 4, 6, 8, device="meta", requires_grad=True)
FUSED = "_FusedAttentionBackward"


def attention():
    return type(F.scaled_dot_product_attention(TOKENS, TOKENS, TOKENS).grad_fn).__name__


def asked_in_a_step(ask):
    """Return what this function returns in the forward pass of a traced step."""
    answers = []

    def body(self, x):
        if not answers:
            answers.append(ask())
        return self.head(x.mean((2, 3)))

    trace(Function(body, head=nn.Linear(3, 2)), 8)
    return answers[0]


def test_attention_and_dropout_are_those_of_a_gpu_within():
    odd = torch.empty(2, 4, 6, 7, device="meta", requires_grad=True)

    def gradients():
        return (
            attention(),
            F.dropout(TOKENS).grad_fn.name(),
            type(F.scaled_dot_product_attention(odd, odd, odd).grad_fn).__name__,
        )

    plain = attention()
    assert plain != FUSED
    even, dropped, uneven = asked_in_a_step(gradients)
    assert even == FUSED
    assert dropped == "NativeDropoutBackward0"
    assert uneven != FUSED
    assert attention() == plain


def replaced():
    """Functions of PyTorch that a trace replaces while it runs."""
    autocast = torch.autocast.__init__, torch.autocast.__enter__
    orders = torch.cuda.synchronize, torch.cuda.Stream, torch.cuda.nvtx.range
    return F.scaled_dot_product_attention, F.dropout, *autocast, *orders


def test_two_threads_that_overlap_leave_nothing_behind_and_do_not_see_each_other():
    before = replaced()
    plain, seen = attention(), {}
    barrier = threading.Barrier(3, timeout=30)

    def early():
        barrier.wait()  # all have begun
        return attention()

    def late():
        barrier.wait()
        barrier.wait()  # the first has ended
        return attention()

    def first():
        seen["first"] = asked_in_a_step(early)
        barrier.wait()

    def second():
        seen["second"] = asked_in_a_step(late)

    threads = [threading.Thread(target=body) for body in (first, second)]
    for thread in threads:
        thread.start()
    barrier.wait()
    seen["outside"] = attention()
    barrier.wait()
    for thread in threads:
        thread.join()
    assert seen == {"first": FUSED, "second": FUSED, "outside": plain}
    assert before == replaced()
    assert attention() == plain


def table_of(function, phase=Phase.TRAIN, **options):
    """Kernels of a classifier that runs a function of its features in its forward pass."""
    classifier = Function(
        lambda self, x: self.head(function(self, x.mean((2, 3)))), head=nn.Linear(3, 2)
    )
    model = on_meta(classifier, 8)
    step = Tracer(model, Sample.of(8), TraceSettings(**options), phase).trace()
    return step.kernels.table


def on_a_stream(self, x):
    stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    event.record()
    with torch.cuda.stream(stream), torch.cuda.nvtx.range("twice"):
        x = x * 2
        x.record_stream(stream)
    torch.cuda.current_stream().wait_stream(stream)
    assert event.query()
    assert event.elapsed_time(copy.deepcopy(event)) + torch.cuda.Stream.priority_range()[0] == 0
    return x


@pytest.mark.parametrize(
    ("naming", "plain"),
    [
        (lambda self, x: x.cuda(0, non_blocking=True), lambda self, x: x),
        (lambda self, x: self.to(device="cuda") and x, lambda self, x: x),
        (lambda self, x: x + torch.zeros(3, device="cuda"), lambda self, x: x + torch.zeros(3)),
        (lambda self, x: x + x.new_ones(3, device=0), lambda self, x: x + x.new_ones(3)),
        (lambda self, x: x * torch.cuda.is_available(), lambda self, x: x * False),
        (on_a_stream, lambda self, x: x * 2),
    ],
)
def test_a_model_that_names_the_gpu_runs_the_kernels_of_one_that_does_not(naming, plain):
    named, unnamed = table_of(naming), table_of(plain)
    np.testing.assert_array_equal(named.sizes, unnamed.sizes)
    np.testing.assert_array_equal(named.counts, unnamed.counts)


def product(self, x):
    return x @ self.head.weight.t() @ self.head.weight


def half_products(table):
    return int(table.counts[(table.kinds == KernelKind.LINEAR) & table.half].sum())


@pytest.mark.parametrize(
    "region",
    [
        lambda: torch.autocast("cuda"),
        lambda: torch.amp.autocast(device_type="meta", dtype=torch.float16),
        torch.cuda.amp.autocast,
    ],
)
def test_autocast_in_the_forward_pass_multiplies_in_16_bits(region):
    def inside(self, x):
        with region():
            return product(self, x).float()

    assert half_products(table_of(inside, Phase.INFER)) == 2
    assert half_products(table_of(product, Phase.INFER)) == 0


def test_disabled_autocast_in_the_forward_pass_multiplies_in_32_bits():
    def inside(self, x):
        with torch.autocast("cuda", enabled=False):
            return product(self, x.float())

    half = {"precision": Precision.AMP_BF16}
    assert half_products(table_of(product, Phase.INFER, **half)) == 3
    assert half_products(table_of(inside, Phase.INFER, **half)) == 1


def test_autocast_outside_of_a_trace_is_that_of_pytorch():
    with pytest.raises(RuntimeError, match="unsupported"):
        torch.autocast("meta")
    with torch.autocast("cpu", torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
        assert half_products(table_of(product, Phase.INFER)) == 0


INTERNAL = {
    "_convolution": "called by conv1d to conv3d, which are cast first",
    "_scaled_dot_product_flash_attention": "called by scaled_dot_product_attention",
    "_thnn_fused_gru_cell": "called by gru_cell",
    "_thnn_fused_lstm_cell": "called by lstm_cell",
    "cudnn_convolution": "called by convolutions; PyTorch passes it through",
    "cudnn_convolution_transpose": "called by convolutions; PyTorch passes it through",
}
"""Operators with an autocast rule that no function in Python calls."""


def test_all_operators_that_autocast_casts_are_listed():
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    names = {name.split("::")[1].split(".")[0] for name in registered}
    assert names - CAST - REFUSED == INTERNAL.keys()


def cast_type(function, *shapes):
    """Return the type of a function's result on 16-bit tensors under autocast for CUDA."""
    inputs = [
        torch.empty(*s, dtype=torch.float16, device="meta", requires_grad=True) for s in shapes
    ]
    with TRACED_GPU, GpuFunctions(KernelLog()), torch.autocast("cuda"):
        return function(*inputs).dtype


IMAGES, ROWS = (2, 3, 8, 8), (4, 16)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), [IMAGES]),
        (nn.RMSNorm(16, device="meta"), [ROWS]),
        (F.mse_loss, [ROWS, ROWS]),
        (F.triplet_margin_loss, [ROWS, ROWS, ROWS]),
        (torch.linalg.vector_norm, [ROWS]),
        (lambda x: x.norm(dim=-1), [ROWS]),
        (lambda x: 1 / x, [ROWS]),
        (lambda x: torch.sum(input=x), [ROWS]),
        (lambda x: x.softmax(-1, torch.float32), [ROWS]),
        (lambda x: F.layer_norm(x.bfloat16(), (16,)), [ROWS]),
    ],
)  # fmt: skip
def test_autocast_returns_32_bits_where_pytorch_does(function, shapes):
    assert cast_type(function, *shapes) == torch.float32


def linear_by_keyword(x):
    return F.linear(input=x.bfloat16(), weight=torch.empty(3, 8, device="meta"))


@pytest.mark.parametrize("function", [F.gelu, lambda x: F.max_pool1d(x, 2), linear_by_keyword])
def test_autocast_leaves_the_type_of_other_functions(function):
    assert cast_type(function, (2, 4, 8)) == torch.float16


def test_a_loss_that_pytorch_refuses_under_autocast_is_refused():
    def loss(self, x):
        return F.binary_cross_entropy(torch.sigmoid(x), torch.ones_like(x))

    with pytest.raises(InputError, match="binary_cross_entropy_with_logits"):
        table_of(loss, precision=Precision.AMP_FP16)


# What is remembered of an operator's results is what the operator would return again.


ATEN = torch.ops.aten


def meta(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def kind_of(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device.type


CALLS = [
    (ATEN.add.Tensor, (meta(4, 3), meta((), dtype=torch.float64)), {}),
    (ATEN.mul.Scalar, (meta(4, dtype=torch.int64), 1), {}),
    (ATEN.mul.Scalar, (meta(4, dtype=torch.int64), 1.0), {}),
    (ATEN.relu.default, (meta(2, 8, 3, 3).to(memory_format=torch.channels_last),), {}),
    (ATEN.convolution_backward.default,
     (meta(2, 8, 6, 6), meta(2, 3, 8, 8), meta(8, 3, 3, 3), [8], [1, 1], [0, 0], [1, 1], False,
      [0, 0], 1, [False, True, True]), {}),
    (ATEN.empty.memory_format, ([2, 3],), {"device": torch.device("cpu")}),
    (ATEN.empty.memory_format, ([2, 3],), {"device": torch.device("meta")}),
]  # fmt: skip


@pytest.mark.parametrize(("func", "args", "kwargs"), CALLS)
def test_a_second_call_returns_what_the_first_did(func, args, kwargs):
    def kinds(output):
        several = output if isinstance(output, tuple) else (output,)
        return [None if t is None else kind_of(t) for t in several]

    expected = kinds(func(*args, **kwargs))
    first, second = (result_of(func, args, kwargs) for _ in range(2))
    assert kinds(first) == kinds(second) == expected
    if expected[-1] is not None:
        outputs = [o[-1] if isinstance(o, tuple) else o for o in (first, second)]
        assert len({o.untyped_storage()._cdata for o in outputs}) == 2


@pytest.mark.parametrize(
    ("func", "others"),
    [
        (ATEN._unsafe_view.default, ([6],)),  # its schema does not say that it is a view
        (ATEN.add_.Tensor, (meta(2, 3),)),
    ],
)
def test_what_lies_in_the_memory_of_another_tensor_still_does(func, others):
    for _ in range(3):
        tensor = meta(2, 3)
        result = result_of(func, (tensor, *others), {})
        assert result.untyped_storage()._cdata == tensor.untyped_storage()._cdata
