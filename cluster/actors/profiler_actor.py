"""The Ray actor that measures: one for each device of a node.

A thin shell around `profiler.measuring`. It is a plain class; who starts one makes an actor of it
with `ray.remote`. Import this module inside `with ray_runtime(...)` only (see there).
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading
from typing import Any

import psutil
import ray

from trappm.profiler.errors import DeviceError, TrappmError
from trappm.profiler.kernels.kernel_measurement import KernelMeasurement
from trappm.profiler.records import Configuration, Measurement
from trappm.profiler.records import Protocol as MeasuringProtocol


def this_process() -> tuple[int, float]:
    """What `kill_process` knows this process by."""
    return os.getpid(), psutil.Process().create_time()


def kill_process(pid: int, began: float) -> None:
    """Ends a process of this node, whatever state it is in, unless its id is another's by now."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if process.create_time() == began:
            process.kill()


class ProfilerActor:
    """Measures on one device of the node that it runs on, one configuration at a time."""

    def __init__(self, device: str) -> None:
        from trappm.profiler.measuring.isolation import Measurer

        self._device = device
        self._measurer = Measurer()
        self._measurer.__enter__()

    def stay(self) -> None:
        """Never return, in a thread of its own: the call fails when this process ends."""
        threading.Event().wait()

    def describe(self) -> dict[str, Any]:
        """Host, GPUs that Ray gave to it, its software stack's fingerprint, and its process."""
        from trappm.profiler.devices import open_device
        from trappm.profiler.host.environment import stack_fingerprint

        try:
            environment = open_device(self._device).environment()
        except DeviceError as error:
            raise DeviceError(f"host {platform.node()}: {error}") from error
        return {
            "host": ray.get_runtime_context().get_node_id(),
            "gpus": [str(gpu) for gpu in ray.get_gpu_ids()],
            "fingerprint": stack_fingerprint(environment),
            "process": this_process(),
        }

    def characterise(self, seconds: float) -> tuple[list[KernelMeasurement], str | None]:
        """Times the device's kernels; what came of each, and why there are none."""
        from trappm.profiler.kernels.characterising import Characteriser

        try:
            with Characteriser() as characteriser:
                return characteriser.characterise(self._device, seconds=seconds), None
        except TrappmError as error:
            return [], str(error)

    def measure(
        self, configuration: Configuration, protocol: MeasuringProtocol, attempt_key: str
    ) -> Measurement:
        return self._measurer.measure(
            configuration, self._device, protocol, attempt_key=attempt_key
        )
