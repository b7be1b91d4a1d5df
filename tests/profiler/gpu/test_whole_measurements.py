"""Whole measurements of a GPU in a measuring process, on a stub of NVML and CUDA on the CPU."""

import dataclasses
import math
import os

import pytest
from fake_cuda import CONTEXT_MIB
from nvml_stub import Board, install
from trusting import TRUSTING

from trappm.profiler.measuring import isolation
from trappm.profiler.measuring.isolation import Measurer
from trappm.profiler.records import Configuration, Measurement, Outcome

STEP = Configuration(architecture="test_resnet", batch_size=2, input_size=32)
QUICK = dataclasses.replace(TRUSTING, power_window_s=0.1)
CORES = sorted(os.sched_getaffinity(0))
ENERGY_MJ = [1000 * reading for reading in range(300)]


@pytest.fixture(scope="module")
def boards(tmp_path_factory):
    """Two GPUs, each with half of the cores near it."""
    half = max(1, len(CORES) // 2)
    return [
        Board("GPU-a", energy_mj=ENERGY_MJ, cores=tuple(CORES[:half])),
        Board("GPU-b", energy_mj=ENERGY_MJ, cores=tuple(CORES[half:] or CORES)),
    ]


@pytest.fixture(scope="module")
def measurer(boards, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        machine = install(patch, *boards)
        for name, value in machine.variables.items():
            patch.setenv(name, value)
        patch.setattr(isolation, "_PRELOAD", (*isolation._PRELOAD, "cuda_on_cpu"))
        with Measurer(lock_dir=tmp_path_factory.mktemp("locks")) as measurer:
            yield measurer


@pytest.fixture
def second(boards):
    """The GPU that is measured."""
    return boards[1]


def test_a_whole_measurement_of_a_gpu(measurer, second):
    actual = measurer.measure(STEP, "cuda:1", QUICK)
    assert actual.outcome is Outcome.OK, actual.message
    facts, detail = actual.environment, actual.memory_detail_mib
    assert facts["device_uuid"] == "GPU-b"
    assert facts["foreign_gpu_processes"] == 0
    assert facts["memory_method"] == "nvml process memory"
    assert facts["power_method"] == "nvml total energy counter"
    assert facts["pinned_cores"] == list(second.cores)
    assert facts["threads"] == len(second.cores)
    assert actual.memory_mib == detail["peak_reserved"] + CONTEXT_MIB
    assert detail["device_used"] == detail["process_used"] == actual.memory_mib
    parameters_mib = 1.8  # of test_resnet, in fp32; with their gradients, and activations
    assert 2 * parameters_mib < detail["peak_allocated"] < 8 * parameters_mib
    assert detail["peak_reserved"] - detail["peak_allocated"] < 2
    assert actual.energy_j > 0
    assert len(actual.step_samples_ms) >= QUICK.min_steps
    assert actual.step.forward_share + actual.step.backward_share < 1
    # Here most of a step is Python's: it waits for the host, and two processes were measured.
    assert 0 < facts["device_time_ms"] < 0.9 * actual.step.median_ms
    first_ms, second_ms = facts["process_medians_ms"]
    assert len(actual.step_samples_ms) % 2 == 0
    between_processes = abs(math.log(first_ms / second_ms)) / 2
    assert facts["step_time_relative_error"] >= between_processes * (1 - 1e-9)
    rate = 1000 * STEP.batch_size / actual.step.median_ms
    assert facts["samples_per_second"] == pytest.approx(rate)
    assert Measurement.from_dict(actual.to_dict()) == actual


@pytest.mark.extension("parallel")
def test_every_rank_observes_its_own_gpu(measurer, second):
    """The ranks are forks of a process that has opened both GPUs."""
    second.reasons = 0x40
    actual = measurer.measure(STEP, "a100x2", QUICK)
    assert actual.outcome is Outcome.UNSTABLE
    assert "rank 1: hardware thermal slowdown" in actual.message
    assert actual.environment["rank_memory_mib"] == [actual.memory_mib] * 2
    assert actual.environment["foreign_gpu_processes"] == 0
    assert actual.environment["sm_clock_mhz"]["median"] == 1410
    assert actual.environment["pinned_cores"] == [*CORES]
