"""What a measured process may do to itself, for real: run in the child in place of the protocol.

The architecture's name says which fault; any other name is measured as usual.
"""

from __future__ import annotations

import collections
import ctypes
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from trappm.profiler.devices import Device, MemoryReading, Window
from trappm.profiler.records import Configuration, Protocol
from trappm.profiler.steps.sampling import StepRun
from trappm.profiler.steps.step import run_protocol

TOUCH_VARIABLE = "TRAPPM_TEST_TOUCH"
"""Names the file in which a fault leaves its process id, or its times."""


def run(
    configuration: Configuration,
    device: Device,
    protocol: Protocol,
    enter: Callable[[str], None],
) -> StepRun:
    if configuration.architecture == "fault-short-host":
        device._capacity_mib = 100.0  # type: ignore[attr-defined]  # as if others had the rest
        enter("create")
        raise MemoryError
    if configuration.architecture == "fault-cudnn-once":
        enter("create")
        return _cudnn_once(configuration, device, protocol, enter)
    fault = FAULTS.get(configuration.architecture)
    if fault is None:
        return run_protocol(configuration, device, protocol, enter)
    enter("measure")
    return fault()


def _cudnn() -> StepRun:
    """Fails each time that it is tried, and leaves a mark of each."""
    with open(os.environ[TOUCH_VARIABLE], "a", encoding="ascii") as file:
        file.write("tried\n")
    raise RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")


def _cudnn_once(
    configuration: Configuration, device: Device, protocol: Protocol, enter: Callable[[str], None]
) -> StepRun:
    """Fails when it is tried first, and then works."""
    path = Path(os.environ[TOUCH_VARIABLE])
    if not path.exists():
        _cudnn()
    usual = replace(configuration, architecture="mobilenetv3_small_050")
    return run_protocol(usual, device, protocol, enter)


def _sigkill() -> StepRun:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def _segfault() -> StepRun:
    ctypes.string_at(0)
    raise AssertionError


def _abort() -> StepRun:
    os.abort()


def _unnamed_signal() -> StepRun:
    os.kill(os.getpid(), signal.SIGRTMIN + 1)
    raise AssertionError


def _native_hang() -> StepRun:
    collections.deque(itertools.repeat(0), maxlen=0)  # never leaves C, nor the interpreter's lock
    raise AssertionError


def _flood() -> StepRun:
    for _ in range(64):
        sys.stdout.write("x" * (1 << 20))
    return _seen([10.0] * 20)


def _endless_flood() -> StepRun:
    while True:
        os.write(1, b"x" * (1 << 16))


def _close_output() -> StepRun:
    os.close(1)
    os.close(2)
    return _seen([10.0] * 20)


def _close_everything() -> StepRun:
    os.closerange(3, 256)
    return _seen([10.0] * 20)


def _fill_the_disk() -> StepRun:
    with open("/dev/full", "w", encoding="ascii") as full:
        full.write("x")
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


def _leave_strays() -> StepRun:
    """Children and grandchildren, in the process group and in sessions of their own."""
    for number in range(12):
        if os.fork() == 0:
            if number % 2:
                os.setsid()
            if number % 3 == 0 and os.fork() != 0:
                os._exit(0)
            with open(os.environ[TOUCH_VARIABLE], "a", encoding="ascii") as log:
                log.write(f"{os.getpid()}\n")
            while True:
                time.sleep(60)
    while Path(os.environ[TOUCH_VARIABLE]).read_text(encoding="ascii").count("\n") < 12:
        time.sleep(0.01)
    raise ValueError("left a dozen")


def _come_back_twice() -> StepRun:
    if os.fork() == 0:
        return _seen([99.0] * 20)
    time.sleep(0.2)
    return _seen([10.0] * 20)


def _stop_server() -> StepRun:
    os.kill(os.getppid(), signal.SIGSTOP)
    return _hang()


def _allocate_100_gib_in_numpy() -> StepRun:
    np.zeros(100 << 30, dtype=np.uint8)
    raise AssertionError


def _note_times() -> StepRun:
    with open(os.environ[TOUCH_VARIABLE], "a", encoding="ascii") as log:
        begin = time.monotonic()
        time.sleep(0.1)
        log.write(f"{begin} {time.monotonic()}\n")
    return _seen([10.0] * 10)


def _write_environment() -> StepRun:
    Path(os.environ[TOUCH_VARIABLE]).write_text(json.dumps(dict(os.environ)), encoding="utf-8")
    return _seen([10.0] * 20)


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
    "fault-cudnn": _cudnn,
    "fault-write-environment": _write_environment,
    "fault-sigkill": _sigkill,
    "fault-segfault": _segfault,
    "fault-abort": _abort,
    "fault-unnamed-signal": _unnamed_signal,
    "fault-hang": _hang,
    "fault-native-hang": _native_hang,
    "fault-sys-exit": lambda: sys.exit(3),
    "fault-flood": _flood,
    "fault-endless-flood": _endless_flood,
    "fault-close-output": _close_output,
    "fault-close-everything": _close_everything,
    "fault-full-disk": _fill_the_disk,
    "fault-strays": _leave_strays,
    "fault-come-back-twice": _come_back_twice,
    "fault-stop-server": _stop_server,
    "fault-100-gib-in-numpy": _allocate_100_gib_in_numpy,
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
