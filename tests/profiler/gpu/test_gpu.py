"""What only a real NVIDIA GPU can show; skipped, saying so, where there is none."""

import dataclasses
import os

import pytest

from trappm.profiler.devices import open_device
from trappm.profiler.errors import DeviceError
from trappm.profiler.measuring.isolation import Measurer
from trappm.profiler.records import (
    QUICK,
    Configuration,
    Outcome,
)

pytestmark = pytest.mark.gpu

STEP = Configuration(architecture="resnet18", batch_size=16, input_size=224)
PARAMETERS_MIB = 11_689_512 * 4 / 2**20  # of resnet18, in fp32
# Other work on the machine must not decide how a test ends; what ran is looked at all the same.
TRUSTING = dataclasses.replace(
    QUICK, name="test", unstable_relative_iqr=1000.0, unstable_lost_share=1000.0
)


@pytest.fixture(scope="module")
def device():
    try:
        actual = open_device("cuda:0")
    except DeviceError as error:
        pytest.skip(f"no NVIDIA GPU to measure on: {error}")
    return actual


@pytest.fixture(scope="module")
def measurer(device, tmp_path_factory):
    with Measurer(lock_dir=tmp_path_factory.mktemp("locks")) as measurer:
        yield measurer


def measured(measurer, **changes):
    configuration = dataclasses.replace(STEP, **changes)
    measurement = measurer.measure(configuration, "cuda:0", TRUSTING)
    if measurement.outcome is Outcome.UNSTABLE:  # strangers or heat: the figures still make sense
        return measurement
    if measurement.outcome is Outcome.UNSUPPORTED:
        pytest.skip(str(measurement.message))
    assert measurement.outcome is Outcome.OK, measurement.message
    return measurement


def test_training_step_is_measured_with_all_its_facts(measurer):
    actual = measured(measurer)
    assert actual.environment["device_uuid"].startswith(("GPU-", "MIG-"))
    assert actual.environment["driver"]
    for metric in ("memory_mib", "power_w", "energy_j"):
        assert (getattr(actual, metric) is None) == (metric in actual.missing)
    assert 1 <= actual.environment["threads"] <= len(actual.environment["pinned_cores"])
    assert set(actual.environment["pinned_cores"]) <= os.sched_getaffinity(0)
    assert 0 < actual.environment["paused_s"] < 0.1 * actual.environment["window_s"] + 0.2
    assert actual.environment["memory_method"]
    if actual.power_w is not None and actual.environment["device_power_limit_w"] is not None:
        assert 5 < actual.power_w < 1.2 * actual.environment["device_power_limit_w"]


def test_memory_is_plausible(measurer):
    small, large = measured(measurer), measured(measurer, batch_size=64)
    for actual in (small, large):
        detail = actual.memory_detail_mib
        # Weights and gradients at least; torch's own memory within the process's.
        assert 2 * PARAMETERS_MIB < detail["peak_allocated"] <= detail["peak_reserved"]
        assert detail["peak_reserved"] < detail["capacity"]
        if actual.memory_mib is not None:
            assert detail["peak_reserved"] < actual.memory_mib < detail["peak_reserved"] + 4096
    images_mib = 48 * 3 * 224 * 224 * 4 / 2**20
    grown = large.memory_detail_mib["peak_allocated"] - small.memory_detail_mib["peak_allocated"]
    assert grown > 4 * images_mib


def test_running_out_of_memory_is_reported_and_frees_the_gpu(measurer):
    huge = dataclasses.replace(STEP, architecture="resnet152", batch_size=65_536)
    actual = measurer.measure(huge, "cuda:0", TRUSTING)
    assert actual.outcome is Outcome.OOM, actual.message
    assert actual.failed_in in {"create", "warmup"}
    assert actual.memory_detail_mib["capacity"] > 1024
    assert actual.memory_detail_mib["last_allocation"] > 0
    measured(measurer)


def test_time_out_ends_the_process_and_frees_the_gpu(measurer):
    endless = dataclasses.replace(
        TRUSTING, min_steps=10_000_000, max_steps=10_000_000, timeout_s=20.0
    )
    actual = measurer.measure(STEP, "cuda:0", endless)
    assert actual.outcome is Outcome.TIMEOUT
    assert "killed after 20 s" in (actual.message or "")
    measured(measurer)
