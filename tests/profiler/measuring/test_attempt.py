"""What a failure means: one attempt in this process, on a fake GPU and on the CPU."""

import time
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import install_cuda
from nvml_stub import GIB, Board, Process, install

from trappm.profiler.devices.cpu import CpuDevice
from trappm.profiler.devices.gpu.cuda import CudaDevice
from trappm.profiler.errors import MissingLibraryError, UnsupportedModelError
from trappm.profiler.measuring.attempt import attempt, explain, hold_lock, others_had_memory
from trappm.profiler.measuring.isolation import _ChildProgress, _host_ran_out
from trappm.profiler.records import Configuration, Measurement, Outcome, Protocol

HERE = "test_attempt:fail"
CONFIGURATION = Configuration(architecture="resnet18", batch_size=1, input_size=32)
failure = ValueError("nothing set")


def fail(*_):
    raise failure


@pytest.fixture
def cuda(monkeypatch):
    install(monkeypatch, Board("GPU-a"))
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.setenv(name, "")  # `prepare` sets them, here in the process of the tests
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    return install_cuda(monkeypatch)


def attempted(key, tmp_path, error):
    """How an attempt ends whose step raises this."""
    global failure  # noqa: PLW0603  # the attempt names a function, and passes it nothing of ours
    failure = error
    sent = []
    request = {
        "configuration": CONFIGURATION.to_dict(),
        "device": key,
        "protocol": Protocol().to_dict(),
        "attempt_key": "a",
        "started_at": "2026-11-21T12:00:00+00:00",
        "lock_dir": str(tmp_path),
        "lock_timeout_s": 10.0,
        "run": HERE,
    }
    attempt(request, sent.append)
    return Measurement.from_dict(sent[-1]["result"])


ON_THE_CPU = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 616562688000 bytes. Error code 12 (Cannot allocate memory)"
)
NO_ENGINE = "GET was unable to find an engine to execute this computation"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a ..."),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    ],
    ids=lambda error: str(error)[:40],
)
def test_memory_of_the_gpu_ran_out(error, cuda, tmp_path):
    actual = attempted("cuda:0", tmp_path, error)
    assert actual.outcome is Outcome.OOM
    assert actual.failed_in == "create"
    assert actual.memory_detail_mib["capacity"] == cuda.total
    assert actual.memory_detail_mib.get("last_allocation") == (
        20 if "Tried" in str(error) else None
    )


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(ON_THE_CPU),
        MemoryError(),
        UnsupportedModelError(f"timm cannot build resnet50: {ON_THE_CPU}"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
    ],
    ids=lambda error: str(error)[:40],
)
def test_want_of_the_hosts_memory_says_nothing_of_a_gpu(error, cuda, tmp_path):
    actual = attempted("cuda:0", tmp_path, error)
    assert (actual.outcome, actual.failed_in) == (Outcome.ERROR, "worker")
    assert "the host ran out of memory in create" in (actual.message or "")
    assert not actual.memory_detail_mib
    assert actual.is_fault_of_worker


@pytest.mark.parametrize(("reserved_mib", "outcome"), [(39_000, Outcome.OOM), (9_000, "error")])
@pytest.mark.parametrize(
    "text",
    [
        NO_ENGINE,
        'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp"',
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    ],
)
def test_error_without_a_reason_is_want_of_memory_on_a_full_gpu(
    text, reserved_mib, outcome, cuda, tmp_path
):
    cuda.max_memory_reserved = reserved_mib
    assert attempted("cuda:0", tmp_path, RuntimeError(text)).outcome == outcome


def test_memory_that_ran_out_next_to_others_is_no_bound_of_the_gpu(cuda, tmp_path, monkeypatch):
    install(monkeypatch, Board("GPU-a", used=35 * GIB, processes=[Process(7, 34 * GIB)]))
    cuda.free, cuda.memory_reserved = 13, 4000
    actual = attempted("cuda:0", tmp_path, torch.OutOfMemoryError("CUDA out of memory."))
    assert actual.outcome is Outcome.OOM
    assert actual.memory_detail_mib["capacity"] == 4013
    assert others_had_memory(actual.memory_detail_mib)
    assert f"it could have 4013 of {cuda.total} MiB" in (actual.message or "")


@pytest.mark.parametrize("broken", [MemoryError(), RuntimeError("init")])
def test_device_that_cannot_be_prepared_is_the_workers_failure(broken, tmp_path, monkeypatch):
    def prepare(_):
        raise broken

    monkeypatch.setattr(CpuDevice, "prepare", prepare)
    actual = attempted("cpu-1t", tmp_path, ValueError("never comes to it"))
    assert (actual.outcome, actual.failed_in) == (Outcome.ERROR, "worker")
    assert actual.is_fault_of_worker


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (MissingLibraryError("the import of shop failed"), Outcome.ERROR),  # another host may do
        (ValueError("Expected more than 1 value per channel when training"), Outcome.UNSUPPORTED),
    ],
)
def test_only_properties_of_the_step_are_unsupported(error, outcome):
    assert explain(error, CpuDevice("cpu-1t"), "create").outcome is outcome


def test_device_that_is_never_ready_is_the_workers_failure():
    progress = _ChildProgress(lock_timeout_s=100.0, timeout_s=7.0)
    assert "never got to its lock" in progress.timeout_failure().message
    progress.follow(iter([{"environment": {"host": "a"}}]))  # its first words: it has the lock
    assert progress.deadline - progress.begin == pytest.approx(7.0)
    stuck = progress.timeout_failure()
    assert (stuck.outcome, stuck.phase) == (Outcome.ERROR, "worker")
    assert "before the device was ready" in stuck.message
    progress.follow(iter([{"phase": "create"}]))
    late = progress.timeout_failure()
    assert (late.outcome, late.phase) == (Outcome.TIMEOUT, "create")


def test_locks_of_several_gpus_share_one_time_limit(tmp_path, monkeypatch):
    limits_s, now_s = [], [0.0]

    class SlowLock:
        def __init__(self, path, **_):
            pass

        def acquire(self, *, timeout, **_):
            limits_s.append(timeout)
            now_s[0] += 4.0

    monkeypatch.setattr("filelock.FileLock", SlowLock)
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    assert hold_lock(SimpleNamespace(lock_names=("a", "b", "c")), tmp_path, 6.0) == 12.0
    assert limits_s == [6.0, 2.0, 0.0]


def test_death_for_want_of_the_hosts_memory_is_no_bound_of_a_gpu():
    cpu, gpu = CpuDevice("cpu-1t"), CudaDevice.__new__(CudaDevice)
    ends = [_host_ran_out("warmup", "killed", d) for d in (cpu, gpu)]
    assert [(e.outcome, e.phase) for e in ends] == [
        (Outcome.OOM, "warmup"), (Outcome.ERROR, "worker")
    ]  # fmt: skip
    assert _host_ran_out("worker", "killed", cpu).outcome is Outcome.ERROR


def test_a_message_that_no_database_takes_is_kept_with_marks(tmp_path):
    actual = attempted("cpu-1t", tmp_path, ValueError("a\0b and half a pair: \ud83d."))
    assert actual.outcome is Outcome.ERROR
    assert actual.message == "ValueError: a\ufffdb and half a pair: \ufffd."
