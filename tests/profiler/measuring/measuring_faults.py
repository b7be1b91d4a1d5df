"""What a measured process may do to itself, for real: run in the child in place of the protocol.

The architecture's name says which fault; any other name is measured as usual.
"""

import collections
import itertools
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from trappm.profiler.devices import MemoryReading, Window
from trappm.profiler.steps.sampling import StepRun, StepSamples

TOUCH_VARIABLE = "TRAPPM_TEST_TOUCH"
"""Names the file in which a fault leaves its process id, or its times."""


def run(configuration, device, protocol, enter):
    name = configuration.architecture
    if name == "fault-short-host":
        device._capacity_mib = 100.0  # as if others had the rest
        enter("create")
        raise MemoryError
    if name == "fault-cudnn-once":
        enter("create")
        if not Path(os.environ[TOUCH_VARIABLE]).exists():
            cudnn_fails()
        configuration = replace(configuration, architecture="mobilenetv3_small_050")
    if name == "waits-for-host":
        return waiting(protocol)
    if name not in FAULTS:
        from trappm.profiler.steps.step import run_protocol  # imports torch

        return run_protocol(configuration, device, protocol, enter)
    enter("measure")
    return FAULTS[name]()


def seen(samples_ms=(10.0,) * 20):
    return StepRun(
        samples=StepSamples(tuple(samples_ms)),
        window=Window(seconds=1.0, energy_j=None, energy_missing="none here"),
        steps_in_window=len(samples_ms),
        memory=MemoryReading(peak_mib=100.0, method="made up"),
    )


def waiting(protocol):
    """A step whose kernels take a tenth of it; it takes 10 ms without power, and 20 ms with it."""
    return StepRun(
        samples=StepSamples((10.0 * (1 + protocol.power_share),) * 4),
        window=Window(seconds=1.0, energy_j=5.0, facts={"device_time_ms": 1.0}),
        steps_in_window=4,
        memory=MemoryReading(peak_mib=1.0, method="none"),
    )


def cudnn_fails():
    """Fails each time that it is tried, and leaves a mark of each."""
    with open(os.environ[TOUCH_VARIABLE], "a", encoding="ascii") as file:
        file.write("tried\n")
    raise RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")


def raise_exception():
    raise ValueError("a model's own mistake\nwith more lines")


def allocate_100_gib():
    import torch

    return torch.empty(100 << 30, dtype=torch.uint8)


def native_bad_alloc():
    sys.stderr.write("terminate called after throwing an instance of 'std::bad_alloc'\n")
    os.abort()


def flood():
    for _ in range(64):
        sys.stdout.write("x" * (1 << 20))
    return seen()


def close_everything():
    os.closerange(3, 256)
    return seen()


def hang():
    Path(os.environ[TOUCH_VARIABLE]).write_text(str(os.getpid()), encoding="ascii")
    while True:
        pass


def kill_server():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def stop_server():
    os.kill(os.getppid(), signal.SIGSTOP)
    hang()


def leave_strays():
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


def come_back_twice():
    if os.fork() == 0:
        return seen([99.0] * 20)
    time.sleep(0.2)
    return seen()


def write_environment():
    Path(os.environ[TOUCH_VARIABLE]).write_text(json.dumps(dict(os.environ)), encoding="utf-8")
    return seen()


FAULTS = {
    "fault-cudnn": cudnn_fails,
    "fault-write-environment": write_environment,
    "fault-sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    # Never leaves C, nor the interpreter's lock.
    "fault-native-hang": lambda: collections.deque(itertools.repeat(0), maxlen=0),
    "fault-flood": flood,
    "fault-close-everything": close_everything,
    "fault-strays": leave_strays,
    "fault-come-back-twice": come_back_twice,
    "fault-stop-server": stop_server,
    "fault-100-gib-in-numpy": lambda: np.zeros(100 << 30, dtype=np.uint8),
    "fault-native-bad-alloc": native_bad_alloc,
    "fault-exception": raise_exception,
    "fault-exit": lambda: os._exit(3),
    "fault-100-gib": allocate_100_gib,
    "fault-kill-server": kill_server,
    "steady": seen,
}
