"""A stand-in for the module `pynvml`, with boards that a test describes and breaks.

It raises the real package's errors, knows the functions that we ask for and no others, and answers
by handle as NVML does. A value may be a list: then each question takes the next of its values, and
the last one stays. An exception among them is raised.
"""

# ruff: noqa: N802
from __future__ import annotations

import os
import sys
import threading
import types
from dataclasses import dataclass, field
from typing import Any

import pynvml as real
import pytest

GIB = 2**30


def error(name: str) -> Exception:
    """An error of NVML, by the name of its code: `GPU_IS_LOST`."""
    return real.NVMLError(getattr(real, f"NVML_ERROR_{name}"))


@dataclass(eq=False)
class Process:
    pid: int
    usedGpuMemory: int | None = GIB  # noqa: N815  # NVML's name


@dataclass(eq=False)
class Board:
    """A GPU, or with `is_instance` a MIG instance of one; None is "not supported"."""

    uuid: str
    name: str = "NVIDIA A100-SXM4-40GB"
    total: int = 40 * GIB
    used: Any = 0
    energy_mj: Any = 1_000_000
    power_mw: Any = 250_000
    power_limit_mw: Any = 400_000
    utilization: Any = (97, 41)
    sm_clock_mhz: Any = 1410
    memory_clock_mhz: Any = 1215
    temperature_c: Any = 55
    reasons: Any = 0
    processes: Any = field(default_factory=list)
    ecc: Any = (1, 1)
    persistence: Any = 1
    mig: Any = (0, 0)
    capability: Any = (8, 0)
    application_clock_mhz: Any = 1410
    reserved: int | None = 0
    """What the driver keeps for itself; None where it is too old to tell, and counts as used."""
    handle: Any = None
    """An exception: NVML cannot reach the board at all."""
    instances: list[Board] = field(default_factory=list)
    is_instance: bool = False


class FakeNvml(types.ModuleType):
    """The module; `boards` are in the order of the PCI bus."""

    NVMLError = real.NVMLError
    NVMLError_NotFound = real.NVMLError_NotFound
    NVMLError_FunctionNotFound = real.NVMLError_FunctionNotFound
    NVMLLibraryMismatchError = real.NVMLLibraryMismatchError
    nvmlMemory_v2 = real.nvmlMemory_v2  # noqa: N815

    def __init__(self, boards: list[Board], driver: str | Exception = "580.1") -> None:
        super().__init__("pynvml")
        self.of_old_driver = False
        self._boards = boards
        self._driver = driver
        self._lock = threading.Lock()  # the watch asks from a thread

    def _answer(self, board: Board, attribute: str) -> Any:
        with self._lock:
            value = getattr(board, attribute)
            if isinstance(value, list) and attribute != "processes":
                value = value.pop(0) if len(value) > 1 else value[0]
        if isinstance(value, Exception):
            raise value
        if value is None:
            raise error("NOT_SUPPORTED")
        return value

    def _of_board(self, board: Board, attribute: str) -> Any:
        if board.is_instance:
            raise error("NOT_SUPPORTED")
        return self._answer(board, attribute)

    def nvmlInit(self) -> None:
        pass

    def nvmlSystemGetDriverVersion(self) -> str:
        if isinstance(self._driver, Exception):
            raise self._driver
        return self._driver

    def nvmlDeviceGetCount(self) -> int:
        return len(self._boards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Board:
        board = self._boards[index]
        if isinstance(board.handle, Exception):
            raise board.handle
        return board

    def nvmlDeviceGetUUID(self, board: Board) -> str:
        return board.uuid

    def nvmlDeviceGetName(self, board: Board) -> bytes:
        return board.name.encode()  # older versions of the package give bytes

    def nvmlDeviceGetMaxMigDeviceCount(self, board: Board) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, board: Board, index: int) -> Board:
        if index >= len(board.instances):
            raise error("NOT_FOUND")
        return board.instances[index]

    def nvmlDeviceGetMigMode(self, board: Board) -> Any:
        return self._of_board(board, "mig")

    def nvmlDeviceGetMemoryInfo(self, board: Board, version: int | None = None) -> Any:
        used = self._answer(board, "used")
        told = {"total": board.total, "used": used, "free": board.total - used}
        if version is None:
            return types.SimpleNamespace(**told)
        if board.reserved is None:
            raise error("FUNCTION_NOT_FOUND")
        return types.SimpleNamespace(**told, reserved=board.reserved)

    def nvmlDeviceGetComputeRunningProcesses(self, board: Board) -> Any:
        if self.of_old_driver:  # as the real package puts it
            raise real.NVMLLibraryMismatchError("Unversioned function called")
        return self._answer(board, "processes")

    def nvmlDeviceGetComputeRunningProcesses_v2(self, board: Board) -> Any:
        return self._answer(board, "processes")

    def nvmlDeviceGetTotalEnergyConsumption(self, board: Board) -> Any:
        return self._of_board(board, "energy_mj")

    def nvmlDeviceGetPowerUsage(self, board: Board) -> Any:
        return self._of_board(board, "power_mw")

    def nvmlDeviceGetUtilizationRates(self, board: Board) -> Any:
        rates = self._of_board(board, "utilization")
        return types.SimpleNamespace(gpu=rates[0], memory=rates[1])

    def nvmlDeviceGetClockInfo(self, board: Board, kind: int) -> Any:
        names = {real.NVML_CLOCK_SM: "sm_clock_mhz", real.NVML_CLOCK_MEM: "memory_clock_mhz"}
        return self._of_board(board, names[kind])

    def nvmlDeviceGetTemperature(self, board: Board, sensor: int) -> Any:
        assert sensor == real.NVML_TEMPERATURE_GPU
        return self._of_board(board, "temperature_c")

    def nvmlDeviceGetCurrentClocksEventReasons(self, board: Board) -> Any:
        if self.of_old_driver:
            raise error("FUNCTION_NOT_FOUND")
        return self._of_board(board, "reasons")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, board: Board) -> Any:
        return self._of_board(board, "reasons")

    def nvmlDeviceGetCudaComputeCapability(self, board: Board) -> Any:
        return self._of_board(board, "capability")

    def nvmlDeviceGetApplicationsClock(self, board: Board, kind: int) -> Any:
        assert kind == real.NVML_CLOCK_SM
        return self._of_board(board, "application_clock_mhz")

    def nvmlDeviceGetEnforcedPowerLimit(self, board: Board) -> Any:
        return self._of_board(board, "power_limit_mw")

    def nvmlDeviceGetEccMode(self, board: Board) -> Any:
        return self._of_board(board, "ecc")

    def nvmlDeviceGetPersistenceMode(self, board: Board) -> Any:
        return self._of_board(board, "persistence")


def install(monkeypatch: pytest.MonkeyPatch, *boards: Board, **module: Any) -> FakeNvml:
    """Puts the fake in the place of `pynvml`, on a machine with these boards."""
    fake = FakeNvml(list(boards), **module)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def own(used: int | None = 3 * GIB) -> Process:
    """This process, as NVML would list it outside a container."""
    return Process(os.getpid(), used)
