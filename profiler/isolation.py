"""Measures in a process of its own, so that nothing a model does can take the worker down.

Every attempt ends in a Measurement: a crash in native code, a hang, a kill and memory running out
are outcomes, told with the phase they happened in. The child, not the worker, holds the lock that
keeps CPU measurements of one host apart, so an orphan still keeps others off until it is dead.
"""

from __future__ import annotations

import signal
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from profiler import procfs
from profiler.attempt import LOCK_DIR, is_out_of_memory, out_of_memory_mib, with_shortage
from profiler.devices import open_device
from profiler.environment import host_facts, utc_now
from profiler.forks import Child, ForkServer, ForkServerError
from profiler.records import Configuration, Measurement, Outcome, Protocol

_ATTEMPT = "profiler.attempt:attempt"
_PRELOAD = ("profiler.attempt", "profiler.stability", "profiler.step", "filelock")
_GRACE_S = 15.0
"""Beyond the wait for the lock, what a child may take to come to it."""


class Measurer:
    """Measures one configuration at a time, each in a fork of a process that is already warm.

    The warm process starts with the first measurement (a few seconds: torch and timm) and ends with
    `close`, with the `with` block, or with this process, whatever ends it.

    Args:
        lock_dir: where the locks of this host's devices are; all measurers must agree on it.
        lock_timeout_s: how long to wait for another measurement to end, before giving up.
        run: a function that stands in for `profiler.step.run_protocol` in the child, as
            "module:name"; None leaves it to the device.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the warm process; a later measurement starts another."""
        self._server.stop()

    def measure(
        self,
        configuration: Configuration,
        device_key: str,
        protocol: Protocol,
        attempt_key: str | None = None,
    ) -> Measurement:
        """One attempt. Whatever the measured process does, this returns how it went.

        Waiting for another measurement of this host counts neither towards the time-out nor in
        `duration_s`; it is in the environment as `lock_wait_s`.

        Raises:
            DeviceError: there is no such device on this machine.
        """
        # A wrong key is the caller's mistake, not an outcome.
        provenance = open_device(device_key).provenance
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
        progress = _Progress(self._lock_timeout_s + _GRACE_S, protocol.timeout_s)
        with self._one_at_a_time:
            oom_kills = procfs.kernel_oom_kills()
            try:
                failure = self._attempt(request, progress)
            except ForkServerError as error:
                self.close()
                failure = _Failure(Outcome.ERROR, "worker", str(error))
            except BaseException:
                self.close()  # an interrupted worker leaves nothing running
                raise
            out_of_memory = procfs.kernel_oom_kills() > oom_kills
        if progress.result is not None:
            return Measurement.from_dict(progress.result)
        if failure.killed and out_of_memory:
            failure = _Failure(Outcome.OOM, failure.phase, "the kernel killed it: out of memory")
        environment = {"device": device_key, **host_facts(), **progress.environment}
        message, detail_mib = failure.message, {}
        if failure.outcome is Outcome.OOM and "memory_limit_mib" in environment:
            capacity_mib = environment["memory_limit_mib"]
            detail_mib = out_of_memory_mib(capacity_mib, device_key, environment)
            message = with_shortage(message, detail_mib)
        return Measurement(
            configuration=configuration,
            device=device_key,
            outcome=failure.outcome,
            protocol=protocol,
            started_at=started_at,
            duration_s=progress.duration_s,
            attempt_key=key,
            provenance=provenance,
            failed_in=failure.phase,
            message=message,
            memory_detail_mib=detail_mib,
            environment=environment,
        )

    def _attempt(self, request: dict[str, Any], progress: _Progress) -> _Failure:
        """Runs one child to its end; the failure counts only if no result has come."""
        child = self._server.fork(_ATTEMPT, request)
        try:
            progress.follow(child.messages(lambda: progress.deadline))
        except TimeoutError:
            failure = progress.timed_out()
            try:
                child.kill()
            except ForkServerError as error:
                self.close()
                return replace(failure, message=f"{failure.message}, without effect: {error}")
            return failure
        finally:
            child.close()
        return self._crash(child, progress.phase)

    def _crash(self, child: Child, phase: str) -> _Failure:
        code, printed = child.exit_code, self._server.printed
        if code is not None and code < 0:
            what = f"was killed by {_signal_name(-code)}"
            killed = code == -signal.SIGKILL
        else:
            what, killed = f"ended with exit status {code}", False
        message = f"the measuring process {what}"
        outcome = Outcome.OOM if is_out_of_memory(printed) else Outcome.ERROR
        last_line = printed.splitlines()[-1] if printed else ""
        return _Failure(outcome, phase, f"{message}: {last_line}" if last_line else message, killed)


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
    """By a SIGKILL that was not ours."""


@dataclass
class _Progress:
    """How far a child has come, and until when it may go on."""

    lock_timeout_s: float
    timeout_s: float
    phase: str = "worker"
    environment: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] | None = None
    begin: float = field(default_factory=time.monotonic)

    @property
    def deadline(self) -> float:
        waits = self.phase == "worker"
        return self.begin + (self.lock_timeout_s if waits else self.timeout_s)

    @property
    def duration_s(self) -> float:
        return time.monotonic() - self.begin

    def follow(self, messages: Iterator[Mapping[str, Any]]) -> None:
        self.begin = time.monotonic()  # the server's own start is not the child's time
        for message in messages:
            if self.phase == "worker" and "phase" in message:
                self.begin = time.monotonic()  # it has the lock
            self.phase = message.get("phase", self.phase)
            self.environment = message.get("environment", self.environment)
            self.result = message.get("result", self.result)

    def timed_out(self) -> _Failure:
        if self.phase == "worker":
            return _Failure(Outcome.ERROR, "worker", "the measuring process never got to its lock")
        message = f"killed after {self.timeout_s:g} s"
        return _Failure(Outcome.TIMEOUT, self.phase, message)
