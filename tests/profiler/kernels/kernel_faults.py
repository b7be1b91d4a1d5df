"""What a kernel may do to the process that times it: run in the child in place of the real ones.

The width of a softmax says which fault; every other call is timed as usual.
"""

import os
import signal
import time

import torch

from trappm.profiler.kernels.kernel_call import KernelCall, Operator
from trappm.profiler.kernels.running import PreparedCall


def prepare(call, device):
    fault = FAULTS.get(call["width"]) if call.operator is Operator.SOFTMAX else None
    return PreparedCall(call, device).run() if fault is None else fault


def _raises():
    raise ValueError("a kernel's own mistake")


def _is_refused():
    raise NotImplementedError("'softmax' not implemented for 'Half'")


def _runs_out():
    torch.empty(1 << 50)


def _dies():
    os.kill(os.getpid(), signal.SIGSEGV)


def _hangs():
    time.sleep(3600)


def _is_slow():
    time.sleep(0.2)


FAULTS = {11: _raises, 12: _is_refused, 13: _runs_out, 14: _dies, 15: _hangs, 16: _is_slow}


def faulty(width):
    return KernelCall.of(Operator.SOFTMAX, batch=2, width=width)
