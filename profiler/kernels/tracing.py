"""The kernels of a call, by the recorder of whole steps."""

from __future__ import annotations

from dataclasses import fields

import torch

from trappm.profiler.kernels.kernel_call import DataType, Direction, KernelCall
from trappm.profiler.kernels.running import PreparedCall
from trappm.profiler.records import Precision
from trappm.profiler.simulation.kernel_profile import KernelProfile, KernelTable
from trappm.profiler.simulation.step_trace import TRACED_BATCH_SIZES, Pass
from trappm.profiler.tracing.allocation_log import AllocationLog
from trappm.profiler.tracing.gpu_functions import GpuFunctions
from trappm.profiler.tracing.kernel_log import KernelLog, kernel_table
from trappm.profiler.tracing.step_recorder import StepRecorder

_PRECISIONS = {
    DataType.FP32: Precision.FP32,
    DataType.FP16: Precision.AMP_FP16,
    DataType.BF16: Precision.AMP_BF16,
}


def kernel_profile_of(call: KernelCall) -> KernelProfile:
    """Return the kernels of a call for every batch size.

    Both phases have the kernels of the call's direction. An optimizer's step has only parameters,
    from which simulations derive its kernels.

    Raises:
        TrappmError: A size is too large for a kernel.
    """
    optimizer = call.optimizer
    if optimizer is not None:
        table, tensors = _table(KernelLog(), KernelLog()), call["tensors"]
        parameters = tensors * call["elements"]
    else:
        first, second = (_recorded(call.with_batch(size)) for size in TRACED_BATCH_SIZES)
        table, tensors, parameters = _table(first, second), 0, 0
        backward = table.passes != Pass.FORWARD
        keep = backward == (call.direction is not Direction.FORWARD)
        table = KernelTable(**{f.name: getattr(table, f.name)[keep] for f in fields(table)})
    return KernelProfile(
        train=table,
        infer=table,
        parameter_tensors=tensors,
        parameters=parameters,
        precision=_PRECISIONS[call.data_type],
        memory_format=call.memory_format,
    )


def _table(first: KernelLog, second: KernelLog) -> KernelTable:
    return kernel_table(first, second, TRACED_BATCH_SIZES)


def _recorded(call: KernelCall) -> KernelLog:
    """Run the call on the meta device, with the forward pass if it needs one."""
    kernels = KernelLog()
    functions = GpuFunctions(kernels)
    prepared = PreparedCall(call, torch.device("meta"))
    with StepRecorder(AllocationLog(()), kernels, functions), functions:
        prepared.run()()
    return kernels
