"""Characterization of a device: times a catalogue of kernels in child processes.

    Characteriser ── calls, seconds ──> child: lock, prepare, time one call after the other
          ^  └── each result as it comes ─┘

If a child fails or hangs, its current call gets that outcome, and another child continues.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from trappm.profiler.devices import Device, open_device
from trappm.profiler.errors import TrappmError, storable
from trappm.profiler.host import procfs
from trappm.profiler.host.environment import host_facts, utc_now
from trappm.profiler.host.forks import Child, ForkServer, ForkServerError
from trappm.profiler.kernels.kernel_call import KernelCall, KernelMeasurement
from trappm.profiler.measuring.attempt import LOCK_DIR, WORKER, is_out_of_memory
from trappm.profiler.measuring.isolation import how_it_ended
from trappm.profiler.records import Outcome, Protocol

BUDGET_S = 60.0
"""Time for all kernels of a device, without its preparation."""

_ATTEMPT = "trappm.profiler.kernels.attempt:attempt"
_PRELOAD = (
    "trappm.profiler.kernels.attempt",
    "trappm.profiler.devices.cpu",
    "trappm.profiler.devices.gpu.cuda",
    "filelock",
)
_GRACE_S = 15.0
"""Time for a child to reach the lock, in addition to the wait for it."""
_PREPARE_TIMEOUT_S = 120.0
_KERNEL_TIMEOUT_S = 30.0
_MOST_CHILDREN = 10
"""Largest number of children that may end early."""
_PROTOCOL = Protocol(name="kernels")
"""Protocol of calls that ended before they were timed."""

OnResult = Callable[[KernelMeasurement, int], None]
"""Called with each result, and with the number of all calls."""


class Characteriser:
    """Times the kernels of one device at a time, in forks of a warm process.

    The warm process starts with the first of them and ends with `close` or the `with` block.

    Args:
        lock_dir, lock_timeout_s: Folder of this host's locks, and longest wait for one.
        kernel_timeout_s: Time after which one call is killed.
        run: Function of the child that prepares a call, as "module:name", instead of
            `PreparedCall`.
    """

    def __init__(
        self,
        *,
        lock_dir: Path = LOCK_DIR,
        lock_timeout_s: float = 1800.0,
        kernel_timeout_s: float = _KERNEL_TIMEOUT_S,
        run: str | None = None,
    ) -> None:
        self._server = ForkServer(_PRELOAD)
        self._request = {"lock_dir": str(lock_dir), "lock_timeout_s": lock_timeout_s, "run": run}
        self._lock_s, self._kernel_s = lock_timeout_s + _GRACE_S, kernel_timeout_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._server.stop()

    def characterise(
        self,
        device_key: str,
        *,
        calls: Sequence[KernelCall] | None = None,
        seconds: float = BUDGET_S,
        on_result: OnResult = lambda result, count: None,
    ) -> list[KernelMeasurement]:
        """Time kernels on a device of this machine; every call ends in an outcome.

        Unstable calls are tried once more if there is time, so a call may have two results.

        Args:
            device_key: Such as `cpu-2t` or `a100`.
            calls: Calls to time; by default the device's catalogue, or the collectives of several
                ranks.
            seconds: Time for all of them; the rest ends as `timeout`.
            on_result: Called with each result.

        Raises:
            InputError: This machine has no such device, or it runs nothing.
            TrappmError: The device cannot be used, or is in use for too long.
        """
        device = open_device(device_key).for_kernels()
        left = None if calls is None else [*calls]
        state = _State(device, left, seconds, self._lock_s, self._kernel_s, on_result)
        try:
            for _ in range(_MOST_CHILDREN):
                request = {
                    **self._request,
                    "device": device_key,
                    "calls": None if state.left is None else [call.text for call in state.left],
                    "seconds": state.seconds_left,
                }
                _one_child(self._server, request, state)
                if not state.left:
                    return state.results
        except BaseException:
            self.close()  # who is interrupted leaves nothing running
            raise
        state.give_up(f"left out: {_MOST_CHILDREN} measuring processes ended early")
        return state.results


@dataclass
class _State:
    """Results so far, over all children."""

    device: Device
    left: list[KernelCall] | None
    """Calls without a result; None before the first child has sent the list."""
    seconds: float
    lock_s: float
    kernel_s: float
    on_result: OnResult
    results: list[KernelMeasurement] = field(default_factory=list)
    environment: Mapping[str, Any] = field(default_factory=dict)
    current: KernelCall | None = None
    phase: str = WORKER
    started_at: str = ""
    begin: float = 0.0
    timing_since: float | None = None
    count: int = 0
    deadline: float = 0.0
    """Time until which the child may be silent."""

    @property
    def seconds_left(self) -> float:
        if self.timing_since is None:
            return self.seconds
        return max(0.0, self.seconds - (time.monotonic() - self.timing_since))

    def hear(self, message: Mapping[str, Any]) -> None:
        self.environment = message.get("environment", self.environment)
        self.phase = message.get("phase", self.phase)
        if "calls" in message:
            self.left = [*map(KernelCall.from_text, message["calls"])]
            self.count = self.count or len(self.left)
            if self.timing_since is None:
                self.timing_since = time.monotonic()
        if "call" in message:
            self.current, self.phase = KernelCall.from_text(message["call"]), "create"
            self.started_at, self.begin = message["started_at"], time.monotonic()
        if "result" in message:
            result = KernelMeasurement.from_dict(message["result"])
            self.add(replace(result, environment=self.environment))

    def add(self, result: KernelMeasurement) -> None:
        self.forget_call()
        self.left = [call for call in self.left or () if call != result.call]
        self.results.append(result)
        self.on_result(result, self.count)

    def forget_call(self) -> None:
        self.current, self.phase = None, WORKER

    def fail(self, call: KernelCall, outcome: Outcome, phase: str, message: str) -> None:
        """Add a failure of the current call of a child, or of one that was not reached."""
        is_current = call == self.current
        self.add(
            KernelMeasurement(
                call=call,
                device=self.device.key,
                outcome=outcome,
                protocol=_PROTOCOL,
                started_at=self.started_at if is_current else utc_now(),
                duration_s=time.monotonic() - self.begin if is_current else 0.0,
                provenance=self.device.provenance,
                failed_in=phase,
                message=storable(message),
                environment={"device": self.device.key, **host_facts(), **self.environment},
            )
        )

    def give_up(self, message: str) -> None:
        for call in [*(self.left or ())]:
            self.fail(call, Outcome.ERROR, WORKER, message)


def _one_child(server: ForkServer, request: dict[str, Any], state: _State) -> None:
    """Run one child to its end; raise TrappmError if it ended before its first call."""
    oom_kills = procfs.kernel_oom_kills()
    state.forget_call()
    child = server.fork(_ATTEMPT, request)
    state.deadline = time.monotonic() + state.lock_s
    is_ready = False
    try:
        for heard in child.messages(lambda: state.deadline):
            state.hear(heard)
            is_ready = is_ready or "calls" in heard
            patience_s = _PREPARE_TIMEOUT_S if state.current is None else state.kernel_s
            state.deadline = time.monotonic() + patience_s
    except TimeoutError:
        _timed_out(child, state)
        return
    finally:
        child.close()
    current, printed = state.current, server.printed
    message = how_it_ended(child.exit_code, printed)
    if current is None:
        if not state.results and not is_ready:
            raise TrappmError(f"the kernels of {state.device.key} cannot be timed: {message}")
        if not is_ready:
            state.give_up(f"left out: {message}")
        return
    ran_out = is_out_of_memory(printed, state.device)
    if procfs.kernel_oom_kills() > oom_kills and state.device.uses_host_memory:
        ran_out, message = True, "the kernel killed it: out of memory"
    state.fail(current, Outcome.OOM if ran_out else Outcome.ERROR, state.phase, message)


def _timed_out(child: Child, state: _State) -> None:
    """End a silent child, with an outcome of its call; raise TrappmError without a call."""
    try:
        child.kill()
    except ForkServerError as error:
        raise TrappmError(f"a measuring process cannot be ended: {error}") from error
    if state.current is None:
        raise TrappmError(
            f"the kernels of {state.device.key} cannot be timed: the measuring process is silent"
        )
    message = f"killed after {state.kernel_s:g} s"
    state.fail(state.current, Outcome.TIMEOUT, state.phase, message)
