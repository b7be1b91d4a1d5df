"""Ceilings of devices that were made up, so that they are known."""

import pytest

from trappm.profiler.kernels.ceilings import ceilings, flops, sentence
from trappm.profiler.kernels.kernel_call import DataType, KernelCall, KernelMeasurement, Operator
from trappm.profiler.kernels.running import kernel_profile_of
from trappm.profiler.records import Outcome, Protocol
from trappm.profiler.simulation.kernel_profile import Size

CACHES = {"L1": 32 << 10, "L2": 1 << 20}


def measured(call, time_ms, outcome=Outcome.OK, caches=CACHES):
    return KernelMeasurement(
        call=call,
        device="cpu-2t",
        outcome=outcome,
        protocol=Protocol(name="kernels"),
        started_at="2026-01-01T00:00:00+00:00",
        duration_s=1.0,
        time_ms=time_ms,
        environment={"cache_bytes": caches},
    )


def matmul(data_type=DataType.FP32, *, tf32=False):
    return KernelCall.of(
        Operator.MATMUL, data_type, batch=1, rows=1000, depth=1000, columns=1000, tf32=tf32
    )


def copy(kibibytes):
    return KernelCall.of(Operator.COPY, batch=kibibytes, width=256)


def test_the_fastest_kernel_of_a_type_is_its_ceiling():
    known = ceilings(
        [
            measured(matmul(), 2.0),
            measured(matmul(), 1.0),
            measured(matmul(tf32=True), 0.25),
            measured(matmul(DataType.FP16), 0.125),
            measured(matmul(DataType.BF16), 0.001, Outcome.UNSTABLE),
        ]
    )
    assert known.tflops == pytest.approx({"fp32": 2.0, "tf32": 8.0, "fp16": 16.0})


def test_bandwidth_belongs_to_the_level_that_holds_the_tensors():
    known = ceilings(
        [
            measured(copy(8), 16 * 1024 / 200e6),
            measured(copy(16), 32 * 1024 / 250e6),
            measured(copy(256), 512 * 1024 / 100e6),
            measured(copy(1024), 2048 * 1024 / 50e6),  # in neither: too close to the cache
            measured(copy(65_536), 131_072 * 1024 / 10e6),
        ]
    )
    assert [(b.level, pytest.approx(b.gb_s)) for b in known.bandwidths] == [
        ("L1", 250.0), ("L2", 100.0), ("memory", 10.0),
    ]  # fmt: skip
    assert "250 in L1, 100 in L2, 10 in memory" in sentence(known)


@pytest.mark.parametrize("caches", [{}, None, [1], {"L1": "x"}, {"L1": -1}])
def test_without_cache_sizes_the_largest_tensors_give_the_bandwidth(caches):
    """Of a file from elsewhere they may be anything."""
    sizes = (4, 64 << 10, 64)
    known = ceilings([measured(copy(kib), 1.0, caches=caches) for kib in sizes])
    assert [b.level for b in known.bandwidths] == ["128 MiB"]


def test_launch_and_dispatch_times_are_derived():
    known = ceilings(
        [
            measured(KernelCall.of(Operator.LAUNCH, kernels=1), 0.02),
            measured(KernelCall.of(Operator.LAUNCH, kernels=100), 0.5),
        ]
    )
    assert (known.launch_us, known.dispatch_us) == pytest.approx((20.0, 5.0))


def test_no_measurements_give_no_ceiling():
    assert sentence(ceilings([])) == "no ceiling is known"


@pytest.mark.parametrize(
    "call",
    [
        matmul(),
        KernelCall.of(Operator.LINEAR, batch=3, rows=5, inputs=7, outputs=11),
        KernelCall.of(
            Operator.CONV2D, batch=2, inputs=64, outputs=96, height=15, window=3, stride=2, groups=4
        ),
        KernelCall.of(
            Operator.CONV2D, batch=2, inputs=3, outputs=8, height=32, window=1, stride=1, groups=1
        ),
        KernelCall.of(
            Operator.CONV2D, batch=1, inputs=3, outputs=96, height=224, window=4, stride=4, groups=1
        ),
        KernelCall.of(Operator.SOFTMAX, batch=2, width=8),
    ],
    ids=str,
)
def test_flops_agree_with_the_kernel_profile(call):
    assert kernel_profile_of(call).at(call.batch_size).sizes[:, Size.FLOPS].sum() == flops(call)
