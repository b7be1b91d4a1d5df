"""One attempt to measure, inside the measuring child.

The child sends phases and environment as they come, so that the parent knows how far it came. The
last message is the `result`, a measurement of any outcome.
"""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trappm.profiler.devices import Device, Findings, open_device
from trappm.profiler.errors import (
    InputError,
    MissingLibraryError,
    TrappmError,
    UnsupportedModelError,
    storable,
)
from trappm.profiler.host.environment import run_facts
from trappm.profiler.records import (
    WORKER,
    Configuration,
    Execution,
    Measurement,
    Outcome,
    Protocol,
)
from trappm.profiler.steps.compiling import use_empty_cache
from trappm.profiler.steps.sampling import judge

LOCK_DIR = Path("/tmp") / f"trappm-{os.getuid()}"  # noqa: S108  # see `lock_path`

_OUT_OF_MEMORY = re.compile(
    r"out.of.memory|CU(BLAS|DNN)_STATUS_ALLOC_FAILED|DEVICE_ALLOCATION_FAILED", re.I
)
_OUT_OF_HOST_MEMORY = re.compile(
    r"can't allocate memory|not enough memory|cannot allocate memory|bad_alloc"
    r"|HOST_ALLOCATION_FAILED|(?<!OutOf)MemoryError",
    re.I,
)
_PERHAPS_OUT_OF_MEMORY = re.compile(
    r"unable to find an engine|NVML_SUCCESS == "
    r"|CU(BLAS|DNN)_STATUS_NOT_INITIALIZED|CUDNN_STATUS_INTERNAL_ERROR\b",
    re.I,
)
"""Errors that may be due to missing memory.

cuDNN without a kernel or a workspace, torch's allocator without NVML, and both libraries without
memory for themselves or after another failure.
"""
_WORTH_ANOTHER = re.compile(
    r"CU(BLAS|DNN)_STATUS_NOT_INITIALIZED|CUDNN_STATUS_INTERNAL_ERROR\b", re.I
)
_NOT_TRAINABLE = re.compile(r"Expected more than 1 value per channel when training")
"""Error of batch norm for a single image of one pixel."""
_ALLOCATION = re.compile(r"(?:tried|unable) to allocate ([\d.]+) ?(bytes|[KMGT]iB)", re.I)
_MIB = {"bytes": 2**-20, "kib": 2**-10, "mib": 1.0, "gib": 2.0**10, "tib": 2.0**20}

_SHORT_SHARE = 0.5
"""A host with a smaller share of its memory free is short of memory for the moment."""


def attempt(request: Mapping[str, Any], send: Callable[[Mapping[str, Any]], None]) -> None:
    """Measure the configuration of the request (see `Measurer`), and send the outcome.

    Raises:
        TrappmError: The device is missing, or its lock was not available in time.
    """
    configuration = Configuration(**request["configuration"])
    protocol = Protocol(**request["protocol"])
    device = open_device(request["device"])
    waited_s = hold_lock(device, Path(request["lock_dir"]), request["lock_timeout_s"])
    if configuration.execution is Execution.COMPILE:
        use_empty_cache(Path(request["lock_dir"]) / f"inductor-{device.lock_names[0]}")
    begin = time.monotonic()
    environment = {**device.environment(), **run_facts(configuration), "lock_wait_s": waited_s}
    send({"environment": environment})
    phases: dict[str, float] = {}

    def enter(name: str) -> None:
        phases.setdefault(name, time.monotonic())
        send({"phase": name})

    try:
        # Still the phase `worker`: a device that cannot be prepared says nothing of the model.
        environment |= device.prepare()
        environment["prepare_s"] = time.monotonic() - begin
        send({"environment": environment})
        enter("create")
        if request["run"] is None:
            findings = device.measure(configuration, protocol, enter)
        else:
            module, _, name = request["run"].partition(":")
            run = getattr(importlib.import_module(module), name)
            findings = judge(run(configuration, device, protocol, enter), protocol)
    except BaseException as error:  # SystemExit as well: a model is not to say when we end
        findings = explain(error, device, [WORKER, *phases][-1])
    end = time.monotonic()
    ends = [*[*phases.values()][1:], end]
    environment |= {
        "load_average_after": os.getloadavg()[0],
        "phase_seconds": {name: ends[i] - phases[name] for i, name in enumerate(phases)},
        **findings.environment,
    }
    if findings.step is not None:
        rate = 1000 * device.ranks * configuration.batch_size / findings.step.median_ms
        environment["samples_per_second"] = rate
    measurement = Measurement(
        configuration=configuration,
        device=request["device"],
        protocol=protocol,
        started_at=request["started_at"],
        duration_s=end - begin,
        attempt_key=request["attempt_key"],
        **{**vars(findings), "environment": environment},
    )
    send({"result": measurement.to_dict()})


def is_out_of_memory(text: str, device: Device) -> bool:
    """Return whether an error's text says that this device's memory ran out."""
    if _OUT_OF_MEMORY.search(text) is not None:
        return True
    return device.uses_host_memory and _OUT_OF_HOST_MEMORY.search(text) is not None


def is_worth_another(measurement: Measurement) -> bool:
    """Return whether a GPU library failed as if without memory, on a GPU with enough."""
    return (
        measurement.outcome is Outcome.ERROR
        and measurement.failed_in != WORKER
        and _WORTH_ANOTHER.search(measurement.message or "") is not None
    )


def others_had_memory(detail_mib: Mapping[str, float]) -> bool:
    """Return whether memory ran out because other processes had a part of it."""
    if "host_memory" in detail_mib:
        return detail_mib["capacity"] < _SHORT_SHARE * detail_mib["host_memory"]
    return "device_memory" in detail_mib


def with_shortage(message: str, detail_mib: Mapping[str, float]) -> str:
    """Return the message of an out-of-memory attempt, and whether others caused it."""
    if not others_had_memory(detail_mib):
        return message
    whole_mib = detail_mib.get("host_memory", detail_mib.get("device_memory"))
    return (
        f"{message}; memory was short: it could have {detail_mib['capacity']:.0f} of "
        f"{whole_mib:.0f} MiB, so it may fit another time"
    )


def lock_path(lock_dir: Path, lock_name: str) -> Path:
    """Return the lock file of a device, shared by all jobs of a user.

    It is in /tmp by default whatever TMPDIR says: two jobs of one host often have different ones.

    Raises:
        TrappmError: The folder belongs to another user, or cannot be made.
    """
    try:
        lock_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = lock_dir.lstat().st_uid
    except OSError as error:
        raise TrappmError(f"no folder for locks at {lock_dir}: {error}") from error
    if owner != os.getuid():
        raise TrappmError(f"{lock_dir} belongs to user {owner}; remove it or name another lock_dir")
    return lock_dir / f"{lock_name}.lock"


def hold_lock(device: Device, lock_dir: Path, timeout_s: float) -> float:
    """Lock the device until this process ends; return the seconds of waiting.

    Raises:
        TrappmError: Another measurement held it for longer than `timeout_s`.
    """
    from filelock import FileLock, Timeout

    begin = time.monotonic()
    for name in device.lock_names:
        # No thread-local bookkeeping, and kept for ever: the kernel releases it when we are gone.
        lock = FileLock(lock_path(lock_dir, name), thread_local=False)
        _held.append(lock)
        try:
            remaining_s = max(0.0, begin + timeout_s - time.monotonic())
            lock.acquire(timeout=remaining_s, poll_interval=0.02)
        except Timeout as error:
            raise TrappmError(
                f"another measurement has held {name} of this host for {timeout_s:.0f} s"
            ) from error
    return time.monotonic() - begin


_held: list[object] = []


def explain(error: BaseException, device: Device, phase: str) -> Findings:
    """Classify a failure: of the configuration, of memory, or of the worker."""
    lines = str(error).strip().splitlines()
    message = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    text = f"{message} {error}"
    outcome, detail_mib = Outcome.ERROR, {}
    is_refusal = isinstance(error, InputError | UnsupportedModelError | NotImplementedError)
    if isinstance(error, MissingLibraryError):
        is_refusal = False  # other hosts may have it
    if phase == WORKER:
        pass
    elif _NOT_TRAINABLE.search(text) or (is_refusal and not _OUT_OF_HOST_MEMORY.search(text)):
        outcome = Outcome.UNSUPPORTED
    elif is_out_of_memory(text, device) or (
        _PERHAPS_OUT_OF_MEMORY.search(text) and device.is_nearly_full()
    ):
        outcome, detail_mib = Outcome.OOM, device.memory_limits_mib()
        message = with_shortage(message, detail_mib)
        allocation = _ALLOCATION.search(str(error))
        if allocation is not None:
            detail_mib["last_allocation"] = float(allocation[1]) * _MIB[allocation[2].lower()]
    elif _OUT_OF_HOST_MEMORY.search(text):
        # The host's want says nothing of the memory that the step takes on the device.
        phase, message = WORKER, f"the host ran out of memory in {phase}: {message}"
    return Findings(
        outcome=outcome,
        failed_in=phase,
        message=storable(message),
        memory_detail_mib=detail_mib,
        provenance=device.provenance,
    )
