"""The CUDA device on a stub of the driver's library: everything of it that needs no GPU."""

import itertools
import os
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import install_cuda, prepared
from nvml_stub import Board, error, install
from test_gpu_listing import machine

from trappm.profiler.devices import MemoryReading, local_devices, open_device
from trappm.profiler.devices.gpu.cuda import _EVENT_BATCH
from trappm.profiler.errors import DeviceError
from trappm.profiler.host import procfs
from trappm.profiler.host.environment import stack_fingerprint
from trappm.profiler.records import PAPER, Configuration, Outcome
from trappm.profiler.steps.sampling import StepRun, judge


def test_mig_instances_of_one_gpu_share_a_lock(monkeypatch):
    machine(monkeypatch)
    first, second = open_device("a100-mig-1g.5gb"), open_device("a100-mig-2g.10gb")
    assert first.lock_name == second.lock_name != open_device("a100").lock_name


def test_mig_instances_have_no_energy_meter(monkeypatch):
    machine(monkeypatch)
    window = window_on("a100-mig-1g.5gb", monkeypatch)
    assert window.energy_j is None
    assert "shares" in (window.energy_missing or "")
    assert "shares" in window.missing["gpu_utilization"]
    assert window.facts["sm_clock_mhz"]["median"] == 1410  # its board's


def test_facts_that_cannot_be_read_are_missing_with_a_reason(monkeypatch):
    install(monkeypatch, Board("GPU-a", ecc=None, power_limit_mw=error("NO_PERMISSION")))
    environment = open_device("cuda:0").environment()
    assert environment["ecc"] is None
    assert environment["device_power_limit_w"] is None
    assert "Not Supported" in environment["untold"]["ecc"]
    assert "Permission" in environment["untold"]["device_power_limit_w"]
    assert environment["persistence"] == 1
    stack_fingerprint(environment)


def test_missing_drivers_and_lost_gpus_are_reported(monkeypatch):
    install(monkeypatch, Board("GPU-a", used=error("GPU_IS_LOST")))
    with pytest.raises(DeviceError, match="GPU is lost"):
        open_device("cuda:0")
    install(monkeypatch, init=error("DRIVER_NOT_LOADED"))
    with pytest.raises(DeviceError, match="Driver Not Loaded"):
        open_device("cuda:0")
    assert all(key.startswith("cpu-") for key in local_devices())


@pytest.mark.parametrize(
    ("function", "broken", "message"),
    [
        ("is_available", lambda: False, "cannot use CUDA on NVIDIA A100"),
        ("get_device_properties", lambda _: SimpleNamespace(uuid="b", total_memory=1), "opened b"),
    ],
)
def test_gpus_that_torch_cannot_use_are_reported(function, broken, message, monkeypatch):
    install(monkeypatch, Board("GPU-a"))
    install_cuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, function, broken)
    with pytest.raises(DeviceError, match=message):
        prepared("cuda:0", monkeypatch)


def test_gpus_without_torch_kernels_are_reported_before_any_model(monkeypatch):
    def no_kernel(*_, **__):
        raise RuntimeError("CUDA error: no kernel image is available for execution\nmore of it")

    install(monkeypatch, Board("GPU-a", "Tesla V100-SXM2-16GB"))
    install_cuda(monkeypatch)
    monkeypatch.setattr(torch, "ones", no_kernel)
    with pytest.raises(DeviceError, match=r"cannot compute on Tesla V100.*no kernel image[^\n]*$"):
        prepared("cuda:0", monkeypatch)


@pytest.mark.parametrize(("capability", "tf32"), [
    ((8, 0), "convolutions only"), ((7, 0), "not available"), (None, None)
])  # fmt: skip
def test_the_environment_reports_tf32(capability, tf32, monkeypatch):
    install(monkeypatch, Board("GPU-a", capability=capability))
    assert open_device("cuda:0").environment()["tf32"] == tf32


def window_on(key, monkeypatch, meanwhile=lambda: None):
    install_cuda(monkeypatch)
    device = prepared(key, monkeypatch)
    device.open_window(lambda: None)
    meanwhile()
    return device.close_window()


def judged(window):
    memory = MemoryReading(peak_mib=100.0, method="made up")
    samples_ms = (10.0,) * 20
    run = StepRun(samples_ms=samples_ms, window=window, steps_in_window=20, memory=memory)
    return judge(run, PAPER)


def test_models_are_created_with_all_cores(monkeypatch):
    install(monkeypatch, Board("GPU-a"))
    install_cuda(monkeypatch)
    threads = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0))
    try:
        torch.set_num_threads(cores + 1)
        prepared("cuda:0", monkeypatch)
        assert torch.get_num_threads() == cores
    finally:
        torch.set_num_threads(threads)


def test_a_gpu_lost_during_the_window_makes_the_run_unstable(monkeypatch):
    board = Board("GPU-a", energy_mj=[1, 2])
    install(monkeypatch, board)

    def fall_off_the_bus():
        lost = error("GPU_IS_LOST")
        for name in ("energy_mj", "power_mw", "sm_clock_mhz", "temperature_c", "used"):
            setattr(board, name, lost)

    measurement = judged(window_on("cuda:0", monkeypatch, fall_off_the_bus))
    assert measurement.outcome is Outcome.UNSTABLE
    assert "GPU is lost" in (measurement.message or "")
    assert measurement.power_w is None
    assert "GPU is lost" in measurement.missing["power_w"]
    assert len(measurement.step_samples_ms) == 20


@pytest.mark.parametrize(
    ("reasons", "unstable"),
    [(0x4, None), (0x1, None), (0x8, "hardware slowdown"), (0x20, "software thermal slowdown"),
     (0x40 | 0x4, "hardware thermal slowdown"), (0x80, "power brake")],
)  # fmt: skip
def test_clock_slowdowns_in_the_window_are_disturbances(reasons, unstable, monkeypatch):
    install(monkeypatch, Board("GPU-a", energy_mj=[1, 2], reasons=[0, reasons, 0]))
    window = window_on("cuda:0", monkeypatch)
    assert window.disturbances == (() if unstable is None else (f"{unstable} of the GPU",))
    assert len(window.facts["clock_event_reasons"]) == reasons.bit_count()


def test_steps_are_timed_in_bounded_batches(monkeypatch):
    """On a clock of events that moves by 2 ms a step; 1 ms is lost to each synchronisation."""
    clock = itertools.count()
    waiting = []

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            self.time = 2 * next(clock)
            waiting.append(self.time)

        def elapsed_time(self, later):
            assert not waiting
            return float(later.time - self.time)

    def synchronize():
        assert len(waiting) <= _EVENT_BATCH + 1
        waiting.clear()

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    install(monkeypatch, Board("GPU-a"))
    device = open_device("cuda:0")
    done = []
    samples_ms = device.time_steps(lambda: done.append(1), 1000)
    assert samples_ms == [2.0] * 1000
    assert len(done) == 1000 + 16  # one before each batch, so that the GPU has work already
    assert device.time_parts(lambda mark: (mark(), mark(), mark())) == [2.0] * 3


def test_bf16_is_refused_on_gpus_without_it(monkeypatch):
    install(monkeypatch, Board("GPU-a", "Tesla V100-SXM2-16GB"))
    device = open_device("v100")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    bf16 = Configuration(
        architecture="resnet18",
        batch_size=1,
        input_size=64,
        precision="amp-bf16",
    )
    fp16 = Configuration(
        architecture="resnet18",
        batch_size=1,
        input_size=64,
        precision="amp-fp16",
    )
    assert "bf16" in (device.refusal(bf16) or "")
    assert device.refusal(fp16) is None


def test_lost_processor_time_is_reported_for_gpus(monkeypatch):
    install(monkeypatch, Board("GPU-a"))
    waits = itertools.count(0.0, 1000.0)
    monkeypatch.setattr(procfs, "run_queue_wait_s", lambda: next(waits))
    window = window_on("cuda:0", monkeypatch)
    assert window.lost_share > 1.0
    assert window.facts["lost_cpu_share"] == window.lost_share
    assert "contention" in str(judged(window).message)
