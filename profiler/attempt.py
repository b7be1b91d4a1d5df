"""One attempt to measure, as the measuring child lives it: lock, prepare, run, tell.

The child sends its phases and environment as they come, so that whoever kills it, or sees it die,
knows how far it came. It ends with a `result`: the measurement, in whatever outcome.
"""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from profiler.devices import Device, Findings, open_device
from profiler.environment import run_facts
from profiler.errors import InputError, TrappmError, UnsupportedModelError
from profiler.records import Configuration, Measurement, Outcome, Protocol, is_cpu_device
from profiler.stability import judge

LOCK_DIR = Path("/tmp") / f"trappm-{os.getuid()}"  # noqa: S108  # see `lock_path`

_OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|not enough memory|cannot allocate memory|bad_alloc", re.I
)
_ALLOCATION = re.compile(r"(?:tried|unable) to allocate ([\d.]+) ?(bytes|[KMGT]iB)", re.I)
_MIB = {"bytes": 2**-20, "kib": 2**-10, "mib": 1.0, "gib": 2.0**10, "tib": 2.0**20}

_SHORT_SHARE = 0.5
"""A host that has less of its memory free than this is short of it, for the moment."""


def attempt(request: Mapping[str, Any], send: Callable[[Mapping[str, Any]], None]) -> None:
    """Measures what the request asks for (see `Measurer`), and sends how it went.

    Raises:
        TrappmError: the device's lock was not to be had, or the device is not here.
    """
    configuration = Configuration(**request["configuration"])
    protocol = Protocol(**request["protocol"])
    device = open_device(request["device"])
    waited_s = _lock(device, Path(request["lock_dir"]), request["lock_timeout_s"])
    begin = time.monotonic()
    environment = {**device.environment(), **run_facts(configuration), "lock_wait_s": waited_s}
    send({"phase": "create", "environment": environment})
    environment |= device.prepare()
    environment["prepare_s"] = time.monotonic() - begin
    send({"phase": "create", "environment": environment})
    phases = {"create": time.monotonic()}

    def enter(name: str) -> None:
        phases.setdefault(name, time.monotonic())
        send({"phase": name})

    try:
        if request["run"] is None:
            findings = device.measure(configuration, protocol, enter)
        else:
            module, _, name = request["run"].partition(":")
            run = getattr(importlib.import_module(module), name)
            findings = judge(run(configuration, device, protocol, enter), protocol)
    except BaseException as error:  # SystemExit as well: a model is not to say when we end
        outcome, message, detail_mib = _explain(error, device, environment)
        findings = Findings(
            outcome=outcome,
            failed_in=list(phases)[-1],
            message=message,
            memory_detail_mib=detail_mib,
            provenance=device.provenance,
        )
    end = time.monotonic()
    ends = [*list(phases.values())[1:], end]
    environment |= {
        "load_average_after": os.getloadavg()[0],
        "phase_seconds": {name: ends[i] - phases[name] for i, name in enumerate(phases)},
        **findings.environment,
    }
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


def is_out_of_memory(text: str) -> bool:
    """Whether an error's words say that memory ran out, on any of our devices."""
    return _OUT_OF_MEMORY.search(text) is not None


def out_of_memory_mib(
    capacity_mib: float, device_key: str, environment: Mapping[str, Any]
) -> dict[str, float]:
    """What is known of the memory that ran out: the capacity, and on the CPU that of the host."""
    detail_mib = {"capacity": capacity_mib}
    if is_cpu_device(device_key) and environment.get("host_memory_mib") is not None:
        detail_mib["host_memory"] = environment["host_memory_mib"]
    return detail_mib


def host_was_short(detail_mib: Mapping[str, float]) -> bool:
    """Whether memory ran out because others had most of the host's, so that it may fit later."""
    return "host_memory" in detail_mib and (
        detail_mib["capacity"] < _SHORT_SHARE * detail_mib["host_memory"]
    )


def with_shortage(message: str, detail_mib: Mapping[str, float]) -> str:
    """The message of an attempt that ran out of memory, and whether the host is to blame."""
    if not host_was_short(detail_mib):
        return message
    return (
        f"{message}; the host was short: it could have {detail_mib['capacity']:.0f} of "
        f"{detail_mib['host_memory']:.0f} MiB, so it may fit another time"
    )


def lock_path(lock_dir: Path, lock_name: str) -> Path:
    """The file that a measurement on this device holds locked; same for all jobs of a user.

    It stands in /tmp by default whatever TMPDIR says, because two jobs of one host often have two.

    Raises:
        TrappmError: the folder belongs to somebody else, or cannot be made.
    """
    try:
        lock_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = lock_dir.lstat().st_uid
    except OSError as error:
        raise TrappmError(f"no folder for locks at {lock_dir}: {error}") from error
    if owner != os.getuid():
        raise TrappmError(f"{lock_dir} belongs to user {owner}; remove it or name another lock_dir")
    return lock_dir / f"{lock_name}.lock"


def _lock(device: Device, lock_dir: Path, timeout_s: float) -> float:
    """Locks the device for this process until it ends; the seconds that it had to wait."""
    from filelock import FileLock, Timeout

    global _held  # noqa: PLW0603
    if device.lock_name is None:
        return 0.0
    begin = time.monotonic()
    # No thread-local bookkeeping, and kept for ever: the kernel releases it when we are gone.
    _held = FileLock(lock_path(lock_dir, device.lock_name), thread_local=False)
    try:
        _held.acquire(timeout=timeout_s, poll_interval=0.02)
    except Timeout as error:
        raise TrappmError(
            f"another measurement has held {device.lock_name} of this host for {timeout_s:.0f} s"
        ) from error
    return time.monotonic() - begin


_held: object = None


def _explain(
    error: BaseException, device: Device, environment: Mapping[str, Any]
) -> tuple[Outcome, str, dict[str, float]]:
    """Outcome, message and, when memory ran out, the capacity and the last allocation."""
    lines = str(error).strip().splitlines()
    message = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    if isinstance(error, InputError | UnsupportedModelError | NotImplementedError):
        return Outcome.UNSUPPORTED, message, {}
    if not isinstance(error, MemoryError) and not is_out_of_memory(f"{message} {error}"):
        return Outcome.ERROR, message, {}
    detail_mib = out_of_memory_mib(device.capacity_mib, device.key, environment)
    asked = _ALLOCATION.search(str(error))
    if asked is not None:
        detail_mib["last_allocation"] = float(asked[1]) * _MIB[asked[2].lower()]
    return Outcome.OOM, with_shortage(message, detail_mib), detail_mib
