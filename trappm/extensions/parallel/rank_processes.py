"""Rank processes of one measurement, which are forked, supervised and ended together.

Their parent is the measuring process. It takes part in no collective, so it can detect the failure
of a rank while the other ranks wait. A failing rank reports its error. If a rank is killed, the
parent exits with the same status, and the worker process explains it.

Only rank 0 runs the protocol. It sends each action to the other ranks, so that all ranks run the
same steps.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from trappm.profiler.devices.base import StepDevice
from trappm.profiler.errors import DeviceError
from trappm.profiler.host.forks import end_with
from trappm.profiler.measuring.attempt import explain
from trappm.profiler.models.sources import source_of
from trappm.profiler.records import WORKER, Configuration, Execution, Outcome, Phase, Protocol
from trappm.profiler.steps.meter import Findings, MarkedStep, MemoryReading, StepMeter, Window
from trappm.profiler.steps.sampling import StepRun, StepSamples
from trappm.profiler.steps.step import make_step, run_protocol

_ALONE_STEPS = 6
"""Steps without communication; the first still has some and is left out."""


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """Measurement of one rank."""

    run: StepRun
    alone_ms: tuple[float, ...]
    """Times of steps without communication; empty if the strategy requires communication."""


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """Number of a rank, and the settings to connect to the other ranks."""

    rank: int
    ranks: int
    strategy: str
    rendezvous: str
    """Path of the file store for the rendezvous."""


class Replica:
    """Model replica or shard of one rank."""

    def __init__(self, settings: RankSettings, device: torch.device) -> None:
        self._settings = settings
        self._device = device
        self._model: nn.Module | None = None

    def join(self) -> None:
        """Connect to the other ranks on this host."""
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            backend_of(self._device.type),
            store=FileStore(self._settings.rendezvous, self._settings.ranks),
            rank=self._settings.rank,
            world_size=self._settings.ranks,
        )
        self.align()  # the first collective opens the connections

    def align(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def share(self, model: nn.Module) -> nn.Module:
        """Return the model wrapped for the strategy."""
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
        """Return a context without gradient synchronization."""
        model = self._model
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()

    def alone_steps(self, configuration: Configuration) -> int:
        """Return the number of steps without communication."""
        can = self._settings.strategy == "ddp" or configuration.phase is Phase.INFER
        return _ALONE_STEPS if can else 0


def backend_of(device_type: str) -> str:
    """Return the communication backend for a type of device."""
    return "nccl" if device_type == "cuda" else "gloo"


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the elements of the outermost module lists, which FSDP shards separately."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from (block for block in child if any(True for _ in block.parameters()))
        else:
            yield from _blocks(child)


class _Leader(StepMeter):
    """Device of rank 0, which sends orders to the other ranks."""

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
        if configuration.execution is Execution.COMPILE:
            return "compiled steps of several ranks are not measured"
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
        self._device.open_window(self._lead_step(step), is_metered=is_metered)
        self.order("open_window")

    def fill_window(self, step: Callable[[], None], count: int, pauses: random.Random) -> None:
        self.order("fill_window", count, pauses)
        self._device.fill_window(step, count, pauses)

    def run_to_tick(self, step: Callable[[], None]) -> None:
        self._device.run_to_tick(self._lead_step(step))

    def close_window(self) -> Window:
        self.order("close_window")
        return self._device.close_window()

    def _lead_step(self, step: Callable[[], None]) -> Callable[[], None]:
        """Return a step that sends an order each time; only rank 0's meter sets their number."""

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
    """Execute the orders of rank 0 until `end`; raises as `run_protocol`."""
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
                device.open_window(step, is_metered=False)  # only rank 0 waits for its meter
            case ("fill_window", count, pauses):
                device.fill_window(step, count, pauses)
            case ("close_window",):
                steps = step.count - steps_before
                window = device.close_window()
    assert memory is not None  # noqa: S101  (the protocol has both)
    assert window is not None  # noqa: S101
    samples = StepSamples(tuple(samples_ms))
    run = StepRun(samples=samples, window=window, steps_in_window=steps, memory=memory)
    return RankRun(run=run, alone_ms=tuple(alone_ms))


_GRACE_S = 0.2
"""Time after the error of a rank in which a killed rank is taken as its cause."""


@dataclass(frozen=True)
class _RankPhase:
    name: str


@dataclass(frozen=True)
class _Rank:
    number: int
    pid: int
    process: int
    """File descriptor that becomes readable when the process ends."""
    connection: Connection


class RankProcesses:
    """Rank processes, one forked for each device.

    Args:
        members: Device of each rank.
        strategy: `ddp` or `fsdp`.
    """

    def __init__(self, members: Sequence[StepDevice], strategy: str) -> None:
        # All ranks inherit this file in memory.
        rendezvous = f"/proc/self/fd/{os.memfd_create('trappm-ranks', 0)}"
        pairs: list[tuple[Connection, Connection]] = [Pipe() for _ in members[1:]]
        parent = os.getpid()
        self._ranks: list[_Rank] = []
        self._phase = WORKER
        for rank, member in enumerate(members):
            settings = RankSettings(
                rank=rank, ranks=len(members), strategy=strategy, rendezvous=rendezvous
            )
            ours, theirs = Pipe()
            pid = os.fork()
            if pid == 0:
                ours.close()
                others = [leaders for leaders, _ in pairs] if rank == 0 else [pairs[rank - 1][1]]
                _run_rank(parent, settings, member, theirs, others)
            theirs.close()
            self._ranks.append(_Rank(rank, pid, os.pidfd_open(pid), ours))

    def prepare(self) -> list[dict[str, Any]]:
        """Return the environment facts of each rank after its preparation.

        Raises:
            DeviceError: A device cannot be used, or the ranks cannot connect.
        """
        facts: Any = self._receive(lambda name: None)
        if isinstance(facts, Findings):
            raise DeviceError(str(facts.message))
        return list(facts)

    def measure(
        self, configuration: Configuration, protocol: Protocol, enter: Callable[[str], None]
    ) -> list[RankRun] | Findings:
        """Return the results of all ranks or the first failure, and end all ranks."""
        self._send((configuration, protocol))
        results: list[RankRun] | Findings = self._receive(enter)
        self._kill()
        return results

    def _send(self, message: Any) -> None:
        """Send each rank a message, or exit like a rank that has ended."""
        for rank in self._ranks:
            try:
                rank.connection.send(message)
            except OSError:  # a broken pipe
                wait([rank.process])
                self._exit_like(rank)

    def _receive(self, enter: Callable[[str], None]) -> Any:
        """Return the response of each rank, or the first failure."""
        answers: dict[int, Any] = {}
        while len(answers) < len(self._ranks):
            waiting: dict[Any, _Rank] = {
                r.connection: r for r in self._ranks if r.number not in answers
            }
            waiting |= {r.process: r for r in self._ranks}
            ready: Any
            for ready in sorted(wait(list(waiting)), key=lambda x: isinstance(x, int)):
                rank = waiting[ready]
                if isinstance(ready, int):
                    self._exit_like(rank)
                try:
                    answer = ready.recv()
                except (EOFError, ConnectionResetError):
                    wait([rank.process])
                    self._exit_like(rank)
                if isinstance(answer, _RankPhase):
                    self._phase = answer.name
                    enter(answer.name)
                elif isinstance(answer, Findings):
                    return self._failure(rank, answer)
                else:
                    answers[rank.number] = answer
        return [answers[rank.number] for rank in self._ranks]

    def _failure(self, rank: _Rank, findings: Findings) -> Findings:
        """Return the failure that ended the step, or exit like a rank that was killed."""
        if findings.outcome is Outcome.ERROR:
            dead = wait([r.process for r in self._ranks], _GRACE_S)
            for other in self._ranks:
                if other.process in dead:
                    self._exit_like(other)
        self._kill()
        phase = WORKER if findings.failed_in == WORKER else self._phase
        message = f"rank {rank.number} of {len(self._ranks)}: {findings.message}"
        return replace(findings, failed_in=phase, message=message)

    def _exit_like(self, rank: _Rank) -> NoReturn:
        """Exit with the status or signal of a rank that ended without a report."""
        code = os.waitstatus_to_exitcode(os.waitpid(rank.pid, 0)[1])
        self._kill()
        # Printed last, because the message contains the end of the output.
        sys.stderr.write(f"(rank {rank.number} of {len(self._ranks)})\n")
        sys.stderr.flush()
        if code < 0:
            with contextlib.suppress(OSError):  # the handler of SIGKILL cannot be set
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)

    def _kill(self) -> None:
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(rank.pid, signal.SIGKILL)
                os.waitpid(rank.pid, 0)


def _run_rank(
    parent: int,
    settings: RankSettings,
    member: StepDevice,
    connection: Connection,
    others: list[Connection],
) -> NoReturn:
    """Run a rank in its own process."""
    phase = WORKER

    def enter(name: str) -> None:
        nonlocal phase
        phase = name
        if settings.rank == 0:
            connection.send(_RankPhase(name))

    try:
        end_with(parent)
        try:
            facts = member.prepare()
            replica = Replica(settings, member.torch_device)
            replica.join()
            connection.send(facts)
            configuration, protocol = connection.recv()
            if settings.rank == 0:
                run = lead(configuration, member, protocol, enter, replica, others)
            else:
                enter("create")
                run = follow(configuration, member, replica, others[0])
            connection.send(run)
        except BaseException as error:
            connection.send(explain(error, member, phase))
        signal.pause()  # exiting would break the connections of the other ranks
    except BaseException:  # sending failed: the parent reads the output and the status
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)
