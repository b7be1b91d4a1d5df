"""Timing of kernel calls, inside the measuring child.

The child sends the list of calls, the current call and each result, so that the parent knows what
is left if the child dies. After an error that may have broken the device's state it ends, and
another child continues.
"""

from __future__ import annotations

import gc
import importlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from trappm.profiler.devices import Findings, MemoryReading, StepDevice, open_device
from trappm.profiler.host.environment import SEED, utc_now
from trappm.profiler.kernels.kernel_call import DataType, KernelCall, KernelMeasurement, Operator
from trappm.profiler.kernels.kernel_choice import Abilities, catalogue, metered
from trappm.profiler.kernels.running import PRECISIONS, PreparedCall, Run, tf32_allowed
from trappm.profiler.measuring.attempt import explain, hold_lock
from trappm.profiler.records import Configuration, Outcome
from trappm.profiler.records import Protocol as StepProtocol
from trappm.profiler.steps.sampling import Samples, StepRun, judge, sample
from trappm.profiler.steps.step import Step, fill_window

_SAMPLING_SHARE = 0.4
"""Share of a call's time for its samples; the rest is for their preparation."""
_NOT_METERED = "left out, to save time: only one call of each kind is metered"
_SHARED = "left out: several ranks share it"
_WARMING_WIDTH = 1024
_WARMING_STEPS = 8

_Send = Callable[[Mapping[str, Any]], None]


class _Prepare(Protocol):
    def __call__(self, call: KernelCall, device: torch.device) -> Run: ...


@runtime_checkable
class CallsOfRanks(Protocol):
    """A device of several ranks, whose kernels are the collectives between them."""

    def calls(self) -> list[KernelCall]:
        """Return the collectives that are timed by default."""

    def prepare_call(self, call: KernelCall, device: torch.device) -> Run:
        """Have each rank create its tensors; the function that is returned runs nothing."""


def attempt(request: Mapping[str, Any], send: _Send) -> None:
    """Time the calls of the request (see `characterise`), and send the results.

    Raises:
        TrappmError: The device is missing, or its lock was not available in time.
    """
    device = open_device(request["device"]).for_kernels()
    prepare = _prepare_of(request["run"])
    ends = {Outcome.ERROR}
    if isinstance(device, CallsOfRanks):
        prepare = device.prepare_call
        ends |= {Outcome.OOM, Outcome.UNSUPPORTED}  # all ranks end with the one that has failed
    waited_s = hold_lock(device, Path(request["lock_dir"]), request["lock_timeout_s"])
    environment = {**device.environment(), "lock_wait_s": waited_s}
    send({"environment": environment})
    environment |= device.prepare()
    device.watch_memory()
    device.memory()  # from here on the heap is as it is in the timed steps
    given = request["calls"]
    calls = _catalogue(device) if given is None else map(KernelCall.from_text, given)
    waiting = [*calls]
    if not isinstance(device, CallsOfRanks):
        environment |= {"cache_bytes": cache_bytes(device.torch_device)}
    environment |= {"seed": SEED}
    send({"environment": environment, "calls": [call.text for call in waiting]})
    timing = Timing(device, waiting, request["seconds"], prepare, send)
    for measurement in timing.results():
        send({"result": measurement.to_dict()})
        if measurement.outcome in ends:
            return


def _catalogue(device: StepDevice) -> list[KernelCall]:
    if isinstance(device, CallsOfRanks):
        return device.calls()
    return catalogue(abilities_of(device))


def protocol_of(seconds: float, calls: int) -> StepProtocol:
    """Return the protocol for this number of calls in this time."""
    return StepProtocol(
        name="kernels",
        warmup_steps=1,
        min_steps=1,  # of what is slower than its share; all others have 5 at least
        max_steps=200,
        max_seconds=_SAMPLING_SHARE * seconds / max(calls, 1),
        target_relative_error=0.01,
        power_window_s=0.25,
        unstable_relative_iqr=0.5,
    )


def _prepare_of(name: str | None) -> _Prepare:
    if name is None:
        return lambda call, device: PreparedCall(call, device).run()
    module, _, function = name.partition(":")
    prepare: _Prepare = getattr(importlib.import_module(module), function)
    return prepare


class Timing:
    """Times calls until they are done or the time is up; unstable ones once more if there is time.

    Args:
        device: Prepared device.
        calls: Calls in their order.
        seconds: Time for all of them.
        prepare: Prepares a call.
        send: Receives the start of each call.
    """

    def __init__(
        self,
        device: StepDevice,
        calls: list[KernelCall],
        seconds: float,
        prepare: _Prepare,
        send: _Send,
    ) -> None:
        self._device = device
        self._calls = calls
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._prepare = prepare
        self._send = send
        self._protocol = protocol_of(seconds, len(calls))
        self._metered = metered(calls)

    def results(self) -> Iterator[KernelMeasurement]:
        self._warm_up()
        again = []
        for call in self._calls:
            measurement = self._measured(call)
            if measurement.outcome is Outcome.UNSTABLE:
                again.append(call)
            yield measurement
        for call in again:
            if time.monotonic() < self._deadline:
                yield self._measured(call)

    def _warm_up(self) -> None:
        """Run products until an idle GPU has raised its clocks."""
        begin, width = time.monotonic(), _WARMING_WIDTH
        if not self._device.min_warmup_s:
            return
        product = KernelCall.of(Operator.MATMUL, batch=1, rows=width, depth=width, columns=width)
        run = PreparedCall(product, self._device.torch_device).run()
        while time.monotonic() - begin < self._device.min_warmup_s:
            self._device.time_steps(run, _WARMING_STEPS)

    def _measured(self, call: KernelCall) -> KernelMeasurement:
        started_at, begin = utc_now(), time.monotonic()
        self._send({"call": call.text, "started_at": started_at})
        phase = "create"

        def enter(name: str) -> None:
            nonlocal phase
            phase = name
            self._send({"phase": name})

        if begin >= self._deadline:
            findings = Findings(
                outcome=Outcome.TIMEOUT,
                failed_in=phase,
                message=f"not begun: the {self._seconds:.0f} s for all kernels were over",
            )
        else:
            try:
                findings = self._timed(call, enter)
            except BaseException as error:
                findings = explain(error, self._device, phase)
            gc.collect()  # the failed step may keep its tensors
        return KernelMeasurement(
            call=call,
            device=self._device.key,
            outcome=findings.outcome,
            protocol=self._protocol,
            started_at=started_at,
            duration_s=time.monotonic() - begin,
            provenance=self._device.provenance,
            samples_ms=findings.step_samples_ms,
            time_ms=None if findings.step is None else findings.step.median_ms,
            iqr_ms=None if findings.step is None else findings.step.iqr_ms,
            power_w=findings.power_w,
            energy_j=findings.energy_j,
            missing=findings.missing,
            failed_in=findings.failed_in,
            message=findings.message,
            facts=findings.environment,
        )

    def _timed(self, call: KernelCall, enter: Callable[[str], None]) -> Findings:
        device, protocol = self._device, self._protocol
        with tf32_allowed(call.tf32):
            enter("create")
            run = self._prepare(call, device.torch_device)
            step = Step(lambda _mark: run())
            enter("warmup")
            device.time_steps(step, protocol.warmup_steps)
            enter("measure")
            is_metered = call in self._metered
            device.open_window(step, is_metered=is_metered)
            before = step.count
            try:
                samples_ms = sample(lambda count: device.time_steps(step, count), protocol)
                if is_metered:
                    fill_window(step, device, protocol, samples_ms)
                steps = step.count - before
            finally:  # a watch of the GPU's sensors is not to go on
                window = device.close_window()
        if not is_metered and window.energy_missing is None:
            why = _SHARED if call.form.is_collective else _NOT_METERED
            window = replace(window, energy_j=None, energy_missing=why)
        memory = MemoryReading(peak_mib=None, method="none")
        samples = Samples(samples_ms)
        stepped = StepRun(samples=samples, window=window, steps_in_window=steps, memory=memory)
        return judge(stepped, protocol)


_CPU_CHECKS = {
    DataType.FP16: ("_is_avx512_fp16_supported", "_is_amx_fp16_supported"),
    DataType.BF16: ("_is_avx512_bf16_supported", "_is_amx_tile_supported"),
}
"""Functions of torch.cpu that tell whether a processor computes in a type natively.

Others convert to 32 bits and back, which is slow.
"""
_AMPERE = 8
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_SIZE = re.compile(r"(\d+)([KM])")


def abilities_of(device: StepDevice) -> Abilities:
    """Return what a prepared device can compute."""
    where = device.torch_device
    is_cpu = where.type == "cpu"
    return Abilities(
        memory_mib=device.capacity_mib,
        data_types=tuple(t for t in DataType if _computes(device, t)),
        has_tf32=where.type == "cuda" and torch.cuda.get_device_capability(where)[0] >= _AMPERE,
        is_cpu=is_cpu,
    )


def cache_bytes(where: torch.device, caches: Path = _CACHES) -> dict[str, int]:
    """Return the device's data caches by name, `L1` to `L3`, as far as known."""
    if where.type == "cuda":
        size = getattr(torch.cuda.get_device_properties(where), "L2_cache_size", 0)
        return {"L2": int(size)} if size else {}
    if where.type != "cpu":
        return {}
    sizes = {}
    for index in sorted(caches.glob("index[0-9]")):
        try:
            level, kind, size = (
                (index / name).read_text(encoding="ascii").strip()
                for name in ("level", "type", "size")
            )
        except OSError:
            continue
        match = _SIZE.fullmatch(size)
        if kind != "Instruction" and match is not None:
            sizes[f"L{level}"] = int(match[1]) << (10 if match[2] == "K" else 20)
    return sizes


def _computes(device: StepDevice, data_type: DataType) -> bool:
    if data_type is DataType.FP32:
        return True
    if device.torch_device.type == "cpu" and not _is_native(data_type):
        return False
    configuration = Configuration(
        architecture="any", batch_size=1, input_size=1, precision=PRECISIONS[data_type]
    )
    return device.refusal(configuration) is None


def _is_native(data_type: DataType) -> bool:
    checks = (getattr(torch.cpu, name, None) for name in _CPU_CHECKS[data_type])
    return any(check() for check in checks if check is not None)
