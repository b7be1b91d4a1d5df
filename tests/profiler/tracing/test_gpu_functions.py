"""What stands in for a GPU's attention and dropout holds within, and for one thread only."""

import threading

import torch
import torch.nn.functional as F  # noqa: N812

from trappm.profiler.tracing.gpu_functions import GpuFunctions
from trappm.profiler.tracing.kernel_log import KernelLog

TOKENS = torch.empty(2, 4, 6, 8, device="meta", requires_grad=True)
FUSED = "_FusedAttentionBackward"


def attention():
    return type(F.scaled_dot_product_attention(TOKENS, TOKENS, TOKENS).grad_fn).__name__


def test_attention_and_dropout_are_those_of_a_gpu_within():
    plain = attention()
    assert plain != FUSED
    with GpuFunctions(KernelLog()):
        assert attention() == FUSED
        assert F.dropout(TOKENS).grad_fn.name() == "NativeDropoutBackward0"
        odd = torch.empty(2, 4, 6, 7, device="meta", requires_grad=True)
        assert type(F.scaled_dot_product_attention(odd, odd, odd).grad_fn).__name__ != FUSED
    assert attention() == plain


def test_two_threads_that_overlap_leave_nothing_behind_and_do_not_see_each_other():
    before = F.scaled_dot_product_attention, F.dropout
    plain, seen = attention(), {}
    barrier = threading.Barrier(3, timeout=30)

    def first():
        with GpuFunctions(KernelLog()):
            barrier.wait()  # all have begun
            seen["first"] = attention()
        barrier.wait()  # the first has ended, the second has not

    def second():
        with GpuFunctions(KernelLog()):
            barrier.wait()
            barrier.wait()
            seen["second"] = attention()

    threads = [threading.Thread(target=body) for body in (first, second)]
    for thread in threads:
        thread.start()
    barrier.wait()
    seen["outside"] = attention()
    barrier.wait()
    for thread in threads:
        thread.join()
    assert seen == {"first": FUSED, "second": FUSED, "outside": plain}
    assert before == (F.scaled_dot_product_attention, F.dropout)
    assert attention() == plain
