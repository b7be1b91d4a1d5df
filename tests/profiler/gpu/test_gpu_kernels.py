"""Kernels on the CUDA device over a stub of the driver's library: energy, and a busy card."""

import itertools
import time

import pytest
from fake_cuda import install_cuda, prepared
from nvml_stub import GIB, Board, Process, install, own

from trappm.profiler.devices.gpu.cuda import CudaDevice
from trappm.profiler.host import procfs
from trappm.profiler.kernels.attempt import Timing
from trappm.profiler.kernels.kernel_call import KernelCall, Operator
from trappm.profiler.kernels.kernel_choice import metered
from trappm.profiler.kernels.running import PreparedCall
from trappm.profiler.records import Outcome

CALLS = [KernelCall.of(Operator.SOFTMAX, batch=batch, width=64) for batch in (1, 2, 3)]


def by_the_clock(device, step, count):
    """A stopwatch in place of CUDA's events."""
    marks = [time.perf_counter()]
    for _ in range(count):
        step()
        marks.append(time.perf_counter())
    return [1000 * (after - before) for before, after in itertools.pairwise(marks)]


@pytest.fixture
def timed(monkeypatch):
    def timed(board):
        install(monkeypatch, board)
        install_cuda(monkeypatch)
        monkeypatch.setattr(procfs, "run_queue_wait_s", lambda: 0.0)
        monkeypatch.setattr(procfs, "stolen_cpu_s", lambda _cores: 0.0)
        monkeypatch.setattr(CudaDevice, "time_steps", by_the_clock)
        monkeypatch.setattr(CudaDevice, "min_warmup_s", 0.0)
        device = prepared("cuda:0", monkeypatch)

        def prepare(call, where):
            return PreparedCall(call, device.torch_device).run()

        return [*Timing(device, CALLS, 30.0, prepare, lambda message: None).results()]

    return timed


def test_one_call_of_each_kind_has_energy(timed):
    counter = [*range(1_000_000, 1_060_000, 1000)]
    results = timed(Board("GPU-a", energy_mj=counter, processes=[own()]))
    (chosen,) = metered(CALLS)
    for result in results:
        assert result.samples_ms
        if result.call == chosen:
            assert result.energy_j is not None
            assert result.energy_j == pytest.approx(
                result.power_w * result.facts["window_s"] / result.facts["steps_in_window"]
            )
        else:
            assert result.energy_j is None
            assert "only one call of each kind" in result.missing["power_w"]


def test_kernels_on_a_busy_gpu_are_unstable(timed):
    board = Board("GPU-a", energy_mj=[1, 2, 3], processes=[own(), Process(pid=1, bytes=GIB)])
    for result in timed(board):
        assert result.outcome is Outcome.UNSTABLE
        assert "other processes on the GPU" in (result.message or "")
        assert result.samples_ms
