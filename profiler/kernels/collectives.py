"""Collectives between ranks, timed as kernels: by them the links of a node are known.

The measuring process is no rank. What it has its stopwatch do, all ranks do on its order, and a
collective takes as long as on the rank whose median is the longest, as a step does.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from statistics import median
from typing import TYPE_CHECKING, Any, NoReturn

from trappm.profiler.devices import StepDevice, open_device
from trappm.profiler.errors import InputError
from trappm.profiler.kernels.kernel_call import KernelCall, Operator
from trappm.profiler.ranks.device import RanksDevice, window_of_all
from trappm.profiler.steps.meter import ExplainedError, Findings, MemoryReading, Window

if TYPE_CHECKING:
    import torch

    from trappm.profiler.ranks.family import Life
    from trappm.profiler.ranks.replica import Replica

Run = Callable[[], Any]


class CollectivesDevice(RanksDevice, StepDevice):
    """The ranks of a node as a stopwatch of what they do together."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self._failure: Findings | None = None
        """Of a rank: all of them have ended with it."""
        if self.strategy != "ddp":
            plain = key.removesuffix(f"-{self.strategy}")
            raise InputError(f"the links of {key} are those of {plain}; characterise that")

    @property
    def torch_device(self) -> torch.device:
        import torch

        return torch.device("cpu")  # of this process, which has no tensors

    @property
    def life(self) -> Life:
        return serve

    def prepare(self) -> dict[str, Any]:
        facts = super().prepare()
        # The ranks know, this process does not.
        self._capacity_mib: float = min(self._order("capacity"))
        return facts

    @property
    def capacity_mib(self) -> float:
        return self._capacity_mib

    def prepare_call(self, call: KernelCall, device: torch.device) -> Run:
        """Has each rank make its tensors; what it returns only stands for the call.

        Raises:
            ExplainedError: a rank could not, or has ended.
        """
        del device
        if not call.form.is_collective or call["ranks"] != self.ranks:
            raise InputError(f"{call} is no collective of {self.ranks} ranks")
        self._order("prepare", call.text)
        return _nothing

    def time_steps(self, step: Callable[[], None], count: int) -> list[float]:
        del step
        slowest: list[float] = max(self._order("time", count), key=median)
        return slowest

    def watch_memory(self) -> None:
        """Of tensors whose sizes are known there is nothing to watch."""

    def memory(self) -> MemoryReading:
        return MemoryReading(peak_mib=None, method="none")

    def open_window(self, step: Callable[[], None], *, is_metered: bool = True) -> None:
        del step, is_metered
        self._order("open")

    def close_window(self) -> Window:
        return window_of_all(self._order("close"), shares_meter=self.uses_host_memory)

    def _order(self, *order: Any) -> list[Any]:
        # What closes a window behind a failure is told the same one.
        if self._failure is None:
            answers = self.family.order(*order)
            if not isinstance(answers, Findings):
                return answers
            self._failure = answers
        raise ExplainedError(self._failure)


def device_to_time(key: str) -> StepDevice:
    """The device whose kernels are timed, or, of several ranks, their collectives.

    Raises:
        InputError: there is no such device on this machine, or it runs nothing.
    """
    device = open_device(key)
    if isinstance(device, RanksDevice):
        return CollectivesDevice(key)
    if not isinstance(device, StepDevice):
        raise InputError(
            f"{key} has no kernels of its own to be timed; name one GPU, cores, or several ranks"
        )
    return device


def serve(device: StepDevice, replica: Replica, orders: Connection) -> NoReturn:
    """A rank's life while collectives are timed: does as it is told, and answers each order."""
    run: Run = _nothing
    while True:
        answer: Any = None
        match orders.recv():
            case ("capacity",):
                answer = device.capacity_mib
            case ("prepare", text):
                run = _nothing  # the last one's tensors are given back first
                run = _collective(KernelCall.from_text(text), device.torch_device)
            case ("time", count):
                replica.align()
                answer = device.time_steps(run, count)
            case ("open",):
                device.open_window(run, is_metered=False)
            case ("close",):
                answer = device.close_window()
        orders.send(answer)


def _collective(call: KernelCall, device: torch.device) -> Run:
    import torch
    import torch.distributed as dist

    whole = torch.ones(call["elements"], device=device)
    if call.operator is Operator.ALL_REDUCE:
        whole.zero_()  # what is summed again and again is not to overflow
        return lambda: dist.all_reduce(whole)
    share = torch.zeros(call["elements"] // call["ranks"], device=device)
    if call.operator is Operator.ALL_GATHER:
        return lambda: dist.all_gather_into_tensor(whole, share)
    return lambda: dist.reduce_scatter_tensor(share, whole)


def _nothing() -> None:
    return None
