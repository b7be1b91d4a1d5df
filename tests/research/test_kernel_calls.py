"""Published kernels, and what the recorder of steps makes of them."""

import pytest

from research.priors.kernel_calls import DataType, KernelCall, Operator, kernels_of
from trappm.profiler.records import MemoryFormat
from trappm.profiler.traced_step import KernelKind, Size

SMALL = {
    Operator.LINEAR: {"batch": 4, "rows": 16, "inputs": 64, "outputs": 32},
    Operator.MATMUL: {"batch": 4, "rows": 16, "depth": 8, "columns": 24},
    Operator.CONV2D: {"batch": 4, "inputs": 64, "outputs": 32, "height": 14, "window": 3,
                      "stride": 2, "groups": 1},
    Operator.ATTENTION: {"batch": 4, "heads": 2, "length": 16, "width": 64},
}  # fmt: skip
KINDS = {
    Operator.LINEAR: KernelKind.LINEAR,
    Operator.MATMUL: KernelKind.MATMUL,
    Operator.CONV2D: KernelKind.DENSE,
    Operator.LAYER_NORM: KernelKind.LAYER_NORM,
    Operator.SOFTMAX: KernelKind.SOFTMAX,
    Operator.ATTENTION: KernelKind.ATTENTION,
}
"""Every other operator is ELEMENTWISE."""


@pytest.mark.parametrize("data_type", DataType)
@pytest.mark.parametrize("operator", Operator)
def test_each_call_is_one_kernel_of_its_kind(operator, data_type):
    sizes = SMALL.get(operator, {"batch": 4, "width": 64})
    kernels = kernels_of(KernelCall.of(operator, data_type, **sizes))
    assert kernels.table.kinds.tolist() == [KINDS.get(operator, KernelKind.ELEMENTWISE)]
    assert kernels.table.half.tolist() == [data_type is not DataType.FP32]
    assert kernels.precision.removeprefix("amp-") == data_type


def test_kernel_sizes_agree_with_hand_counts():
    call = KernelCall.of(
        Operator.CONV2D, DataType.FP16, MemoryFormat.CHANNELS_LAST,
        batch=8, inputs=64, outputs=128, height=28, window=3, stride=2, groups=1,
    )  # fmt: skip
    kernels = kernels_of(call).at(8)
    assert kernels.table.channels_last.all()
    assert kernels.sizes[0, Size.FLOPS] == 2 * 8 * 14 * 14 * 128 * 64 * 9
    assert kernels.sizes[0, Size.WRITTEN_BYTES] == 2 * 8 * 14 * 14 * 128
    assert kernels.sizes[0, Size.READ_BYTES] == 2 * (8 * 28 * 28 * 64 + 128 * 64 * 9)
