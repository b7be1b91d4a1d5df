"""Measurements in a process of their own, so that no model can harm the worker.

Every attempt ends in a Measurement: crashes, hangs, kills and missing memory are outcomes, recorded
with their phase. The child holds the lock of the device, so an orphan keeps others away while it
runs.
"""

from __future__ import annotations

import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from trappm.profiler.devices import Device, open_device
from trappm.profiler.errors import storable
from trappm.profiler.host import procfs
from trappm.profiler.host.environment import host_facts, utc_now
from trappm.profiler.host.forks import Child, ForkServer, ForkServerError
from trappm.profiler.measuring.attempt import (
    LOCK_DIR,
    is_out_of_memory,
    is_worth_another,
    with_shortage,
)
from trappm.profiler.records import WORKER, Configuration, Measurement, Outcome, Protocol
from trappm.profiler.steps.sampling import of_two_processes, waits_for_host

_ATTEMPT = "trappm.profiler.measuring.attempt:attempt"
_PRELOAD = (
    "trappm.profiler.measuring.attempt",
    "trappm.profiler.steps.sampling",
    "trappm.profiler.steps.step",
    "trappm.profiler.devices.cpu",
    "trappm.profiler.devices.gpu.cuda",
    "filelock",
)
_GRACE_S = 15.0
"""Time for a child to reach the lock, in addition to the wait for it."""


class Measurer:
    """Measures one configuration at a time, each in a fork of a warm process.

    >>> from trappm.profiler.records import QUICK, Configuration
    >>> step = Configuration(architecture="test_resnet", batch_size=2, input_size=64)
    >>> with Measurer() as measurer:
    ...     label = measurer.measure(step, "cpu-1t", QUICK)
    >>> label.memory_mib > 0
    True

    The warm process starts with the first measurement (a few seconds: torch and timm) and ends with
    `close`, the `with` block, or this process.

    Args:
        lock_dir, lock_timeout_s: Folder of this host's locks, and longest wait for one.
        run: Function to call in the child instead of `run_protocol`, as "module:name".
    """

    def __init__(
        self,
        *,
        lock_dir: Path = LOCK_DIR,
        lock_timeout_s: float = 1800.0,
        run: str | None = None,
    ) -> None:
        self._lock_dir = lock_dir
        self._lock_timeout_s = lock_timeout_s
        self._run = run
        self._server = ForkServer(_PRELOAD)
        self._one_at_a_time = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the warm process; a later measurement starts another."""
        self._server.stop()

    def measure(
        self,
        configuration: Configuration,
        device_key: str,
        protocol: Protocol,
        attempt_key: str | None = None,
        on_phase: Callable[[str], None] = lambda phase: None,
    ) -> Measurement:
        """Measure a configuration; any behavior of the measured process is an outcome.

        If a GPU library fails as if without memory, though there was enough, a second process tries
        again. A step that waits for the host is measured in two processes: it differs more between
        them than within one. The wait for other measurements counts neither for the timeout nor for
        `duration_s`; it is in the environment as `lock_wait_s`.

        Args:
            configuration, device_key, protocol: What to measure, where and how.
            attempt_key: Name of the attempt; by default a new one.
            on_phase: Called with each phase as it begins.

        Raises:
            DeviceError: This machine has no such device.
        """
        first = self._measure(configuration, device_key, protocol, attempt_key, on_phase)
        waits = waits_for_host(first)
        if not waits and not is_worth_another(first):
            return first
        if waits:  # only the step times of the second process count
            protocol = replace(protocol, power_share=0.0)
        again = self._measure(configuration, device_key, protocol, first.attempt_key, on_phase)
        if waits:
            return of_two_processes(first, again)
        environment = {**again.environment, "first_try": first.message}
        message = again.message
        if is_worth_another(again):
            message = f"{message} (twice, the second time afresh; perhaps for want of memory)"
        return replace(
            again,
            environment=environment,
            message=message,
            started_at=first.started_at,
            duration_s=first.duration_s + again.duration_s,
        )

    def _measure(
        self,
        configuration: Configuration,
        device_key: str,
        protocol: Protocol,
        attempt_key: str | None,
        on_phase: Callable[[str], None],
    ) -> Measurement:
        # A wrong key is the caller's mistake, not an outcome.
        device = open_device(device_key)
        started_at, key = utc_now(), attempt_key or uuid.uuid4().hex
        request = {
            "configuration": configuration.to_dict(),
            "device": device_key,
            "protocol": protocol.to_dict(),
            "attempt_key": key,
            "started_at": started_at,
            "lock_dir": str(self._lock_dir),
            "lock_timeout_s": self._lock_timeout_s,
            "run": self._run,
        }
        progress = _ChildProgress(
            self._lock_timeout_s + _GRACE_S, protocol.timeout_s, on_phase=on_phase
        )
        failure = self._attempt_alone(request, progress, device)
        if progress.result is not None:
            return Measurement.from_dict(progress.result)
        environment = {"device": device_key, **host_facts(), **progress.environment}
        unexplained = Measurement(
            configuration=configuration,
            device=device_key,
            outcome=failure.outcome,
            protocol=protocol,
            started_at=started_at,
            duration_s=progress.duration_s,
            attempt_key=key,
            provenance=device.provenance,
            failed_in=failure.phase,
            message=storable(failure.message),
            environment=environment,
        )
        return _with_memory_limits(unexplained)

    def _attempt_alone(
        self, request: dict[str, Any], progress: _ChildProgress, device: Device
    ) -> _Failure:
        """Run an attempt while no other runs; failures of the server count too."""
        with self._one_at_a_time:
            oom_kills = procfs.kernel_oom_kills()
            try:
                failure = self._attempt(request, progress, device)
            except ForkServerError as error:
                self.close()
                return _Failure(Outcome.ERROR, WORKER, str(error))
            except BaseException:
                self.close()  # an interrupted worker leaves nothing running
                raise
            if failure.killed and procfs.kernel_oom_kills() > oom_kills:
                message = "the kernel killed it: out of memory"
                return _host_ran_out(failure.phase, message, device)
            return failure

    def _attempt(
        self, request: dict[str, Any], progress: _ChildProgress, device: Device
    ) -> _Failure:
        """Run one child to its end; the failure counts only without a result."""
        child = self._server.fork(_ATTEMPT, request)
        try:
            progress.follow(child.messages(lambda: progress.deadline))
        except TimeoutError:
            failure = progress.timeout_failure()
            try:
                child.kill()
            except ForkServerError as error:
                self.close()
                return replace(failure, message=f"{failure.message}, without effect: {error}")
            return failure
        finally:
            child.close()
        return self._crash(child, progress.phase, device)

    def _crash(self, child: Child, phase: str, device: Device) -> _Failure:
        code, printed = child.exit_code, self._server.printed
        killed = code == -signal.SIGKILL
        message = end_message(code, printed)
        out_of_memory = phase != WORKER and is_out_of_memory(printed, device)
        return _Failure(Outcome.OOM if out_of_memory else Outcome.ERROR, phase, message, killed)


def end_message(exit_code: int | None, printed: str) -> str:
    """Return the message about a measuring process that ended without a result.

    Args:
        exit_code: Below 0 for a signal.
        printed: Output of the process; the last line may give the reason.
    """
    if exit_code is not None and exit_code < 0:
        what = f"was killed by {_signal_name(-exit_code)}"
    else:
        what = f"ended with exit status {exit_code}"
    last_line = printed.splitlines()[-1] if printed else ""
    message = f"the measuring process {what}"
    return f"{message}: {last_line}" if last_line else message


def _with_memory_limits(failed: Measurement) -> Measurement:
    """Add the available memory to a measurement that ran out of host memory."""
    facts = failed.environment
    if failed.outcome is not Outcome.OOM or "memory_limit_mib" not in facts:
        return failed
    detail_mib = {
        "capacity": facts["memory_limit_mib"],
        "host_memory": facts["memory_allowed_mib"],
    }
    message = storable(with_shortage(failed.message or "", detail_mib))
    return replace(failed, message=message, memory_detail_mib=detail_mib)


def _host_ran_out(phase: str, message: str, device: Device) -> _Failure:
    """Return the outcome of missing host memory; only steps in host memory caused it."""
    if phase != WORKER and device.uses_host_memory:
        return _Failure(Outcome.OOM, phase, message)
    return _Failure(Outcome.ERROR, WORKER, message)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # the real-time ones between the first and the last


@dataclass(frozen=True)
class _Failure:
    outcome: Outcome
    phase: str
    message: str
    killed: bool = False
    """True if a SIGKILL that was not ours ended it."""


@dataclass
class _ChildProgress:
    """Phase and deadline of a child."""

    lock_timeout_s: float
    timeout_s: float
    phase: str = WORKER
    has_lock: bool = False
    environment: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] | None = None
    begin: float = field(default_factory=time.monotonic)
    on_phase: Callable[[str], None] = lambda phase: None

    @property
    def deadline(self) -> float:
        return self.begin + (self.timeout_s if self.has_lock else self.lock_timeout_s)

    @property
    def duration_s(self) -> float:
        return time.monotonic() - self.begin

    def follow(self, messages: Iterator[Mapping[str, Any]]) -> None:
        self.begin = time.monotonic()  # the server's own start is not the child's time
        for message in messages:
            if not self.has_lock:  # the first word comes as soon as it has it
                self.begin, self.has_lock = time.monotonic(), True
            phase = message.get("phase", self.phase)
            if phase != self.phase:
                self.on_phase(phase)
            self.phase = phase
            self.environment = message.get("environment", self.environment)
            self.result = message.get("result", self.result)

    def timeout_failure(self) -> _Failure:
        if not self.has_lock:
            return _Failure(Outcome.ERROR, WORKER, "the measuring process never got to its lock")
        message = f"killed after {self.timeout_s:g} s"
        if self.phase == WORKER:
            return _Failure(Outcome.ERROR, WORKER, f"{message}, before the device was ready")
        return _Failure(Outcome.TIMEOUT, self.phase, message)
