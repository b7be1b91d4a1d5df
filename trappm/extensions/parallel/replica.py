"""A rank's part of a step: how it joins the others, shares the model, and measures.

Only rank 0 runs the protocol. It orders the other ranks to do whatever it does on its own device,
so all ranks take the same steps.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from trappm.profiler.devices.base import StepDevice
from trappm.profiler.models.sources import source_of
from trappm.profiler.records import Configuration, Phase, Protocol
from trappm.profiler.steps.meter import MarkedStep, MemoryReading, StepMeter, Window
from trappm.profiler.steps.sampling import StepRun
from trappm.profiler.steps.step import make_step, run_protocol

_ALONE_STEPS = 6
"""Steps without communication; the first still has some and is left out."""


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """Measurement of one rank."""

    run: StepRun
    alone_ms: tuple[float, ...]
    """Times of steps without communication; empty if the strategy always communicates."""


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """Number of a rank, and how it finds the others."""

    rank: int
    ranks: int
    strategy: str
    rendezvous: str
    """Path of the file over which the ranks find each other."""


class Replica:
    """A rank's copy of the model, or its share of it."""

    def __init__(self, settings: RankSettings, device: torch.device) -> None:
        self._settings = settings
        self._device = device
        self._model: nn.Module | None = None

    def join(self) -> None:
        """Connect to the other ranks, all of which are on this host."""
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            backend_of(self._device.type),
            store=FileStore(self._settings.rendezvous, self._settings.ranks),
            rank=self._settings.rank,
            world_size=self._settings.ranks,
        )
        self.align()  # connections are made by the first collective

    def align(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def share(self, model: nn.Module) -> nn.Module:
        """Return the model as the ranks train it together."""
        if self._settings.strategy == "ddp":
            self._model = DistributedDataParallel(model)
            return self._model
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self._device.type, (self._settings.ranks,))
        for block in [*_blocks(model), model]:
            fully_shard(block, mesh=mesh)
        return model

    def alone(self) -> AbstractContextManager[None]:
        """Return a context in which gradients are not summed."""
        model = self._model
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()

    def alone_steps(self, configuration: Configuration) -> int:
        """Return the number of steps without communication."""
        can = self._settings.strategy == "ddp" or configuration.phase is Phase.INFER
        return _ALONE_STEPS if can else 0


def backend_of(device_type: str) -> str:
    """Return the library of collectives for a type of device."""
    return "nccl" if device_type == "cuda" else "gloo"


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the elements of the outermost lists of modules, which FSDP gathers one by one."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from (block for block in child if any(True for _ in block.parameters()))
        else:
            yield from _blocks(child)


class _Leader(StepMeter):
    """The device of rank 0, which gives the orders."""

    def __init__(
        self, device: StepDevice, replica: Replica, followers: Sequence[Connection]
    ) -> None:
        self._device = device
        self._replica = replica
        self._followers = followers
        self.min_warmup_s = device.min_warmup_s

    def order(self, *order: Any) -> None:
        for follower in self._followers:
            follower.send(order)

    def refusal(self, configuration: Configuration) -> str | None:
        return self._device.refusal(configuration)

    @property
    def torch_device(self) -> torch.device:
        return self._device.torch_device

    def share(self, model: nn.Module) -> nn.Module:
        return self._replica.share(model)

    def time_steps(self, step: Callable[[], None], count: int) -> list[float]:
        self._step = step
        self.order("time_steps", count)
        self._replica.align()
        return self._device.time_steps(step, count)

    def time_parts(self, step: MarkedStep) -> list[float]:
        self.order("time_parts")
        return self._device.time_parts(step)

    def time_alone(self, count: int) -> list[float]:
        """Time the last step without communication."""
        self.order("time_alone", count)
        self._replica.align()
        with self._replica.alone():
            return self._device.time_steps(self._step, count)

    def watch_memory(self) -> None:
        self._device.watch_memory()

    def memory(self) -> MemoryReading:
        self.order("memory")
        return self._device.memory()

    def power_window_s(self, protocol: Protocol) -> float:
        return self._device.power_window_s(protocol)

    def open_window(self, step: Callable[[], None], *, is_metered: bool = True) -> None:
        self._device.open_window(self._led(step), is_metered=is_metered)
        self.order("open_window")

    def fill_window(self, step: Callable[[], None], count: int, pauses: random.Random) -> None:
        self.order("fill_window", count, pauses)
        self._device.fill_window(step, count, pauses)

    def run_to_tick(self, step: Callable[[], None]) -> None:
        self._device.run_to_tick(self._led(step))

    def close_window(self) -> Window:
        self.order("close_window")
        return self._device.close_window()

    def _led(self, step: Callable[[], None]) -> Callable[[], None]:
        """Return the step with an order for each; only rank 0's meter knows their number."""

        def led() -> None:
            self.order("step")
            step()

        return led


def lead(
    configuration: Configuration,
    device: StepDevice,
    protocol: Protocol,
    enter: Callable[[str], None],
    replica: Replica,
    followers: Sequence[Connection],
) -> RankRun:
    """Run the protocol as rank 0; raises as `run_protocol`."""
    leader = _Leader(device, replica, followers)
    run = run_protocol(configuration, leader, protocol, enter)
    count = replica.alone_steps(configuration)
    alone_ms = leader.time_alone(count)[1:] if count else []
    leader.order("end")
    return RankRun(run=run, alone_ms=tuple(alone_ms))


def follow(
    configuration: Configuration, device: StepDevice, replica: Replica, orders: Connection
) -> RankRun:
    """Carry out the orders of rank 0 until the end; raises as `run_protocol`."""
    source_of(configuration.architecture)
    device.watch_memory()
    step = make_step(configuration, device.torch_device, replica.share)
    samples_ms: list[float] = []
    alone_ms: list[float] = []
    memory: MemoryReading | None = None
    window: Window | None = None
    steps_before = steps = 0
    while (order := orders.recv()) != ("end",):
        match order:
            case ("step",):
                step()
            case ("time_steps", count):
                replica.align()
                samples_ms += device.time_steps(step, count)
            case ("time_parts",):
                device.time_parts(step)
            case ("time_alone", count):
                replica.align()
                with replica.alone():
                    alone_ms = device.time_steps(step, count)[1:]
            case ("memory",):
                memory = device.memory()
            case ("open_window",):
                samples_ms, steps_before = [], step.count
                device.open_window(step, is_metered=False)  # rank 0 alone waits for its meter
            case ("fill_window", count, pauses):
                device.fill_window(step, count, pauses)
            case ("close_window",):
                steps = step.count - steps_before
                window = device.close_window()
    assert memory is not None  # noqa: S101  (the protocol has both)
    assert window is not None  # noqa: S101
    run = StepRun(samples_ms=tuple(samples_ms), window=window, steps_in_window=steps, memory=memory)
    return RankRun(run=run, alone_ms=tuple(alone_ms))
