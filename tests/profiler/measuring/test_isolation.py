"""Faults are real here: processes die, hang and run out of memory, and every attempt is told."""

import dataclasses
import json
import os
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import measuring_faults
import psutil
import pytest
from filelock import FileLock
from trusting import TRUSTING

from trappm.profiler.devices import open_device
from trappm.profiler.errors import TrappmError
from trappm.profiler.host import forks
from trappm.profiler.host.environment import stack_fingerprint
from trappm.profiler.measuring import isolation
from trappm.profiler.measuring.attempt import lock_path, others_had_memory
from trappm.profiler.measuring.isolation import Measurer
from trappm.profiler.records import Configuration, Outcome

TINY = Configuration(architecture="mobilenetv3_small_050", batch_size=1, input_size=64)


@pytest.fixture(scope="module")
def lock_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("locks")


@pytest.fixture(scope="module")
def touched(tmp_path_factory):
    """A file for what the faults leave behind; the fork server inherits its name."""
    path = tmp_path_factory.mktemp("touched") / "file"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(measuring_faults.TOUCH_VARIABLE, str(path))
        yield path


SECRETS = dict.fromkeys(("PGPASSWORD", "TRAPPM_TOKEN", "registry_password"), "hidden") | {
    "AZURE_STORAGE_CONNECTION_STRING": "AccountName=a;AccountKey=hidden",
    "SOME_DATABASE": "postgresql://somebody:hidden@host/labels",
}
SETTINGS = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}


@pytest.fixture(scope="module")
def measurer(lock_dir, touched):
    """A measurer whose user has secrets in the environment."""
    with (
        Measurer(lock_dir=lock_dir, run="measuring_faults:run") as measurer,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in (SECRETS | SETTINGS).items():
            patch.setenv(name, value)
        yield measurer


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # a zombie that has not been waited for is dead


def measure(measurer, model, protocol=TRUSTING, device="cpu-1t", **more):
    configuration = dataclasses.replace(TINY, architecture=model)
    return measurer.measure(configuration, device, protocol, **more)


def wait_until(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    ("fault", "outcome", "message"),
    [
        ("fault-sigkill", Outcome.ERROR, "SIGKILL"),
        ("fault-exception", Outcome.ERROR, "ValueError: a model's own mistake"),
        ("fault-exit", Outcome.ERROR, "exit status 3"),
        ("fault-close-everything", Outcome.ERROR, "Bad file descriptor"),
        ("fault-native-bad-alloc", Outcome.OOM, "bad_alloc"),
        ("fault-100-gib", Outcome.OOM, "allocate"),
        ("fault-100-gib-in-numpy", Outcome.OOM, "allocate"),
    ],
)
def test_fault_becomes_an_outcome(measurer, fault, outcome, message):
    measurement = measure(measurer, fault)
    assert measurement.outcome is outcome
    assert message in measurement.message
    assert "\n" not in measurement.message
    assert measurement.failed_in == "measure"
    assert measurement.step is None
    assert measurement.memory_mib is None
    assert measurement.environment["threads"] == 1
    before = open_device("cpu-1t").environment()
    assert stack_fingerprint(measurement.environment) == stack_fingerprint(before)
    if outcome is Outcome.OOM:
        assert measurement.memory_detail_mib["capacity"] > 0
    if "100-gib" in fault:
        assert measurement.memory_detail_mib["last_allocation"] == 100 * 1024


def test_host_that_is_short_of_memory_is_told(measurer):
    measurement = measure(measurer, "fault-short-host")
    assert measurement.outcome is Outcome.OOM
    assert measurement.failed_in == "create"
    assert "could have 100 of" in measurement.message
    assert measurement.memory_detail_mib["capacity"] == 100
    assert measurement.memory_detail_mib["host_memory"] > 100
    assert others_had_memory(measurement.memory_detail_mib)
    assert not others_had_memory({"capacity": 800.0, "host_memory": 1000.0})
    assert not others_had_memory({"capacity": 100.0})  # a whole GPU's


@pytest.mark.parametrize("model", ["fault-flood", "fault-come-back-twice"])
def test_bad_manners_do_no_harm(measurer, model):
    measurement = measure(measurer, model)
    assert measurement.outcome is Outcome.OK, measurement.message
    assert measurement.step_time_ms == 10.0


def test_busy_process_is_killed_in_time(measurer):
    """It never leaves C, nor the interpreter's lock."""
    impatient = dataclasses.replace(TRUSTING, timeout_s=1.0)
    measurement = measure(measurer, "fault-native-hang", impatient)
    assert measurement.outcome is Outcome.TIMEOUT
    assert measurement.message == "killed after 1 s"


def test_fork_server_that_ends_or_stops_is_replaced(tmp_path, touched, monkeypatch):
    """Without torch, so that its process starts quickly."""
    monkeypatch.setattr(isolation, "_PRELOAD", ())
    monkeypatch.setattr(forks, "_STOP_TIMEOUT_S", 0.2)
    label = tmp_path / "label.jsonl"
    label.write_text(json.dumps({**TINY.to_dict(), "step_time_ms": 1.0}), encoding="utf-8")
    impatient = dataclasses.replace(TRUSTING, timeout_s=1.0)
    with Measurer(lock_dir=tmp_path, run="measuring_faults:run") as light:
        ended = measure(light, "fault-kill-server", device=f"replay:{label}")
        assert (ended.outcome, ended.failed_in) == (Outcome.ERROR, "worker")
        measure(light, "steady", device=f"replay:{label}")
        touched.unlink(missing_ok=True)
        monkeypatch.setattr(forks, "_ANSWER_TIMEOUT_S", 0.2)
        stopped = measure(light, "fault-stop-server", impatient, device=f"replay:{label}")
        assert stopped.outcome is Outcome.TIMEOUT
        assert "without effect" in stopped.message
        assert wait_until(lambda: not is_alive(int(touched.read_text(encoding="ascii"))))
        monkeypatch.undo()
        assert measure(light, "steady", device=f"replay:{label}").outcome is Outcome.OK


def held_by_this_process():
    children = {process.pid for process in psutil.Process().children(recursive=True)}
    return len(os.listdir("/proc/self/fd")), children, set(os.listdir("/dev/shm"))


def test_measured_models_see_no_secrets_in_their_environment(measurer, touched):
    touched.unlink(missing_ok=True)
    measure(measurer, "fault-write-environment")
    seen = json.loads(touched.read_text(encoding="utf-8"))
    assert not seen.keys() & SECRETS.keys()
    assert SETTINGS.items() <= seen.items()


def test_nothing_leaks(measurer):
    measure(measurer, "steady")
    before = held_by_this_process()
    for fault in ("fault-sigkill", "fault-exception", "steady"):
        measure(measurer, fault)
    assert held_by_this_process() == before


def test_whatever_was_left_behind_ends_wherever_it_went(measurer, touched):
    touched.write_text("", encoding="ascii")
    measurement = measure(measurer, "fault-strays")
    assert "left a dozen" in measurement.message
    strays = [int(pid) for pid in touched.read_text(encoding="ascii").split()]
    assert len(strays) == 12
    assert [pid for pid in strays if is_alive(pid)] == []


def test_waiting_for_the_lock_is_no_timeout(measurer, lock_dir):
    held = FileLock(lock_path(lock_dir, "cpu"), thread_local=False)
    held.acquire()
    release = threading.Timer(1.3, held.release)
    release.start()
    patient = dataclasses.replace(TRUSTING, timeout_s=1.0)
    measurement = measure(measurer, "steady", patient)
    release.join()
    assert measurement.outcome is Outcome.OK, measurement.message
    assert measurement.environment["lock_wait_s"] > 1.0
    assert measurement.duration_s < measurement.environment["lock_wait_s"]


def test_lock_that_is_never_free_is_told(lock_dir, monkeypatch):
    monkeypatch.setattr(isolation, "_PRELOAD", ())  # it never comes to need torch
    with (
        FileLock(lock_path(lock_dir, "cpu")),
        Measurer(lock_dir=lock_dir, lock_timeout_s=0.2) as measurer,
    ):
        measurement = measurer.measure(TINY, "cpu-1t", TRUSTING)
    assert measurement.outcome is Outcome.ERROR
    assert measurement.failed_in == "worker"
    assert "another measurement has held cpu" in measurement.message


def test_lock_folder_of_somebody_else_is_refused(tmp_path):
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(TrappmError, match="12345"):
        lock_path(tmp_path, "cpu")


def test_library_of_the_gpu_that_fails_is_tried_once_more_in_a_new_process(measurer, touched):
    touched.unlink(missing_ok=True)
    actual = measure(measurer, "fault-cudnn-once", attempt_key="key")
    began = datetime.fromisoformat(actual.started_at)
    assert timedelta(0) <= datetime.now(UTC) - began - timedelta(seconds=actual.duration_s)
    assert actual.outcome is Outcome.OK, actual.message
    assert actual.attempt_key == "key"
    assert "CUDNN_STATUS_INTERNAL_ERROR" in actual.environment["first_try"]
    touched.unlink()
    actual = measure(measurer, "fault-cudnn")
    assert (actual.outcome, actual.failed_in) == (Outcome.ERROR, "measure")
    assert "CUDNN_STATUS_INTERNAL_ERROR" in actual.message
    assert "perhaps for want of memory" in actual.message
    assert touched.read_text(encoding="ascii").split() == ["tried"] * 2


def test_power_is_measured_in_the_first_of_two_processes_only(measurer):
    actual = measure(measurer, "waits-for-host")
    assert actual.outcome is Outcome.OK, actual.message
    assert actual.environment["process_medians_ms"] == [20.0, 10.0]
    assert (actual.power_w, actual.protocol) == (5.0, TRUSTING)
