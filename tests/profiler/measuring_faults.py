"""What a measured process may do to itself, for real: run in the child in place of the protocol.

The architecture's name says which fault; any other name is measured as usual.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from profiler.devices import Device, MemoryReading, Window
from profiler.records import Configuration, Protocol
from profiler.step import StepRun, run_protocol

TOUCH_VARIABLE = "TRAPPM_TEST_TOUCH"
"""Names the file in which a fault leaves its process id, or its times."""


def run(
    configuration: Configuration,
    device: Device,
    protocol: Protocol,
    enter: Callable[[str], None],
) -> StepRun:
    fault = FAULTS.get(configuration.architecture)
    if fault is None:
        return run_protocol(configuration, device, protocol, enter)
    enter("measure")
    return fault()


def _sigkill() -> StepRun:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def _segfault() -> StepRun:
    ctypes.string_at(0)
    raise AssertionError


def _hang() -> StepRun:
    touch = os.environ.get(TOUCH_VARIABLE)
    if touch is not None:
        Path(touch).write_text(str(os.getpid()), encoding="ascii")
    while True:
        pass


def _native_bad_alloc() -> StepRun:
    sys.stderr.write("terminate called after throwing an instance of 'std::bad_alloc'\n")
    os.abort()


def _exception() -> StepRun:
    raise ValueError("a model's own mistake\nwith more lines")


def _exit() -> StepRun:
    os._exit(3)


def _allocate_100_gib() -> StepRun:
    torch.empty(100 << 30, dtype=torch.uint8)
    raise AssertionError


def _allocate_until_the_limit() -> StepRun:
    held = []
    while True:  # never touched, so the machine is not troubled
        held.append(torch.empty(1 << 30, dtype=torch.uint8))


def _python_memory_error() -> StepRun:
    raise MemoryError


def _kill_server() -> StepRun:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
    raise AssertionError


def _leave_a_process_behind() -> StepRun:
    if os.fork() == 0:
        _hang()
    while not Path(os.environ[TOUCH_VARIABLE]).exists():
        time.sleep(0.01)
    raise ValueError("went away and left a process")


def _note_times() -> StepRun:
    with open(os.environ[TOUCH_VARIABLE], "a", encoding="ascii") as log:
        begin = time.monotonic()
        time.sleep(0.1)
        log.write(f"{begin} {time.monotonic()}\n")
    return _seen([10.0] * 10)


def _seen(samples_ms: list[float], **window: object) -> StepRun:
    return StepRun(
        samples_ms=tuple(samples_ms),
        window=Window(seconds=1.0, energy_j=None, energy_missing="none here", **window),  # type: ignore[arg-type]
        steps_in_window=len(samples_ms),
        memory=MemoryReading(peak_mib=100.0, method="made up"),
    )


def _alternating() -> Iterator[float]:
    yield from (10.0, 20.0) * 10


FAULTS: dict[str, Callable[[], StepRun]] = {
    "fault-sigkill": _sigkill,
    "fault-segfault": _segfault,
    "fault-hang": _hang,
    "fault-native-bad-alloc": _native_bad_alloc,
    "fault-exception": _exception,
    "fault-exit": _exit,
    "fault-100-gib": _allocate_100_gib,
    "fault-limit": _allocate_until_the_limit,
    "fault-memory-error": _python_memory_error,
    "fault-kill-server": _kill_server,
    "fault-leave-process": _leave_a_process_behind,
    "note-times": _note_times,
    "steady": lambda: _seen([10.0] * 20),
    "noisy": lambda: _seen(list(_alternating())),
    "drifting": lambda: _seen([10.0] * 10 + [12.0] * 10),
    "contended": lambda: _seen([10.0] * 20, lost_share=0.4),
    "disturbed": lambda: _seen([10.0] * 20, disturbances=("2 other processes on the GPU",)),
}
