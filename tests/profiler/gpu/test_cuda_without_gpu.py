"""The CUDA device on a stub of the driver's library: everything of it that needs no GPU."""

import itertools
import os
from types import SimpleNamespace

import pynvml
import pytest
import torch
from fake_cuda import install_cuda, judged, prepared, window_on
from nvml_stub import Board, install
from test_gpu_listing import machine

from trappm.profiler.devices import open_device
from trappm.profiler.devices.gpu.cuda import _EVENT_BATCH
from trappm.profiler.errors import DeviceError
from trappm.profiler.host import procfs
from trappm.profiler.records import Configuration, Outcome


def test_mig_instances_share_a_lock_and_have_no_energy_meter(monkeypatch):
    machine(monkeypatch)
    first, second = open_device("a100-mig-1g.5gb"), open_device("a100-mig-2g.10gb")
    assert first.lock_name == second.lock_name != open_device("a100").lock_name
    window = window_on("a100-mig-1g.5gb", monkeypatch)
    assert window.energy_j is None
    assert "shares" in (window.energy_missing or "")
    assert "shares" in window.missing["gpu_utilization"]
    assert window.facts["sm_clock_mhz"]["median"] == 1410  # its board's


def no_kernel(*_, **__):
    raise RuntimeError("CUDA error: no kernel image is available for execution\nmore of it")


@pytest.mark.parametrize(
    ("function", "broken", "message"),
    [
        ("cuda.is_available", lambda: False, "cannot use CUDA on Tesla V100"),
        ("cuda.get_device_properties", lambda _: SimpleNamespace(uuid="b", total_memory=1),
         "opened b"),
        ("ones", no_kernel, r"cannot compute on Tesla V100.*no kernel image[^\n]*$"),
    ],
)  # fmt: skip
def test_gpus_that_torch_cannot_use_are_reported(function, broken, message, monkeypatch):
    install(monkeypatch, Board("GPU-a", "Tesla V100-SXM2-16GB"))
    install_cuda(monkeypatch)
    monkeypatch.setattr(f"torch.{function}", broken)
    with pytest.raises(DeviceError, match=message):
        prepared("cuda:0", monkeypatch)


@pytest.fixture
def host(monkeypatch):
    """Two sockets of 24 cores with two threads each: thread n + 48 is of the core of thread n."""
    host = SimpleNamespace(allowed=set(range(96)), quota=None, pinned=None)
    install_cuda(monkeypatch)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: host.allowed)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: setattr(host, "pinned", cores))
    monkeypatch.setattr(procfs, "first_sibling", lambda cpu: cpu % 48)
    monkeypatch.setattr(procfs, "cpu_quota", lambda: host.quota)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: setattr(host, "threads", count))
    return host


def near(*cores):
    return tuple(core for core in range(96) if core % 48 in range(*cores))


def prepared_gpus(host, monkeypatch, *boards):
    """Cores and threads of the process that measures each GPU of the machine."""
    install(monkeypatch, *boards)
    found = []
    for index in range(len(boards)):
        prepared(f"cuda:{index}", monkeypatch)
        found.append((list(host.pinned), host.threads))
    return found


def test_eight_gpus_share_the_cores_of_their_sockets(host, monkeypatch):
    sockets = near(0, 24), near(24, 48)
    boards = [Board(f"GPU-{gpu}", cores=sockets[gpu // 4]) for gpu in range(8)]
    found = prepared_gpus(host, monkeypatch, *boards)
    assert sorted(core for cores, _ in found for core in cores) == list(range(96))
    assert found[5] == ([*range(30, 36), *range(78, 84)], 12)
    host.allowed = {0, 1, 2, 48, 24}
    allowed = [cores for cores, _ in prepared_gpus(host, monkeypatch, boards[0], boards[4])]
    assert allowed == [[0, 1, 2, 48], [24]]
    host.allowed = set(range(96))
    host.quota = 20.0  # of the whole container
    assert [threads for _, threads in prepared_gpus(host, monkeypatch, *boards)] == [2] * 8
    host.quota = 4.0
    assert [threads for _, threads in prepared_gpus(host, monkeypatch, *boards)] == [1] * 8


def test_no_loss_of_a_gpu_ends_as_a_label(monkeypatch):
    """The GPU is lost after any number of questions, each of which takes 1 ms."""
    outcomes = []
    while len(outcomes) < 99 and Outcome.OK not in outcomes:
        board = Board("GPU-a", energy_mj=[*range(99)])
        install(monkeypatch, board, delay_ms=1, lost_after=3 * len(outcomes))
        try:
            outcomes.append(judged(window_on("cuda:0", monkeypatch)).outcome)
        except (DeviceError, pynvml.NVMLError):  # the second is the fake CUDA's
            outcomes.append(None)
    assert outcomes == sorted(outcomes, key=[None, Outcome.UNSTABLE, Outcome.OK].index)
    assert {*outcomes} == {None, Outcome.UNSTABLE, Outcome.OK}


@pytest.mark.parametrize(
    ("reasons", "unstable"),
    [(0x4, None), (0x8, "hardware slowdown"), (0x40 | 0x4, "hardware thermal slowdown")],
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


@pytest.mark.parametrize(
    ("capability", "precision", "execution", "word"),
    [
        ((7, 0), "amp-bf16", "eager", "bf16"),
        ((7, 0), "fp32", "compile", None),
        ((7, 5), "amp-fp16", "compile", "Triton"),
    ],
)
def test_steps_that_a_gpu_cannot_run_are_refused(
    monkeypatch, capability, precision, execution, word
):
    """Old ones have no bf16, and Triton does not support them."""
    install(monkeypatch, Board("GPU-a"))
    has_bf16 = capability >= (8, 0)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    step = Configuration(
        architecture="resnet18", batch_size=1, input_size=64, precision=precision,
        execution=execution,
    )  # fmt: skip
    refusal = open_device("cuda:0").refusal(step)
    assert refusal is None if word is None else word in refusal


def test_lost_processor_time_is_reported_for_gpus(monkeypatch):
    install(monkeypatch, Board("GPU-a"))
    waits = itertools.count(0.0, 1000.0)
    monkeypatch.setattr(procfs, "run_queue_wait_s", lambda: next(waits))
    window = window_on("cuda:0", monkeypatch)
    assert window.lost_share > 1.0
    assert "contention" in str(judged(window).message)
