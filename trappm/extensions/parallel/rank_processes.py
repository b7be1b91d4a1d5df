"""The rank processes of one measurement: forked, supervised, and ended together.

Their parent is the measuring process. It takes part in no collective, so it notices whatever
happens to a rank while the others wait for it. A rank that fails reports how. If a rank is killed,
the parent exits in the same way, which the worker above it explains.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

from trappm.extensions.parallel.replica import RankRun, RankSettings, Replica, follow, lead
from trappm.profiler.devices.base import StepDevice
from trappm.profiler.errors import DeviceError
from trappm.profiler.host.forks import end_with
from trappm.profiler.measuring.attempt import WORKER, explain
from trappm.profiler.records import Configuration, Outcome, Protocol
from trappm.profiler.steps.meter import Findings

_GRACE_S = 0.2
"""How long after the error of a rank to look for another one that was killed and caused it."""


RankLoop = Callable[[StepDevice, Replica, Connection], NoReturn]


@dataclass(frozen=True)
class _Phase:
    name: str


@dataclass(frozen=True)
class _Rank:
    number: int
    pid: int
    process: int
    """Descriptor that is readable when the process has ended."""
    connection: Connection


class RankProcesses:
    """Processes that share steps, forked for each device.

    Args:
        members: Device of each rank.
        strategy: How the ranks share a step.
        loop: What each rank runs instead of a step, with a connection for orders and answers.
    """

    def __init__(
        self, members: Sequence[StepDevice], strategy: str, loop: RankLoop | None = None
    ) -> None:
        # A file in memory, which every rank inherits.
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
                _run_rank(parent, settings, member, theirs, others, loop)
            theirs.close()
            self._ranks.append(_Rank(rank, pid, os.pidfd_open(pid), ours))

    def prepare(self) -> list[dict[str, Any]]:
        """Return the facts of each prepared rank.

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
        for rank in self._ranks:
            rank.connection.send((configuration, protocol))
        results: list[RankRun] | Findings = self._receive(enter)
        self._kill()
        return results

    def order(self, *order: Any) -> list[Any] | Findings:
        """Return the answers of all ranks to an order, or the first failure, which ends all."""
        for rank in self._ranks:
            rank.connection.send(order)
        self._phase = "measure"
        answers: list[Any] | Findings = self._receive(lambda name: None)
        return answers

    def _receive(self, enter: Callable[[str], None]) -> Any:
        """Return an answer of each rank, or the failure of one."""
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
                except EOFError:
                    wait([rank.process])
                    self._exit_like(rank)
                if isinstance(answer, _Phase):
                    self._phase = answer.name
                    enter(answer.name)
                elif isinstance(answer, Findings):
                    return self._failure(rank, answer)
                else:
                    answers[rank.number] = answer
        return [answers[rank.number] for rank in self._ranks]

    def _failure(self, rank: _Rank, findings: Findings) -> Findings:
        """Return the failure that ended the step; exit like a killed rank if there is one."""
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
        """End this process as a rank has ended that reported nothing."""
        code = os.waitstatus_to_exitcode(os.waitpid(rank.pid, 0)[1])
        self._kill()
        # Printed last, because the end of the output goes into the message.
        sys.stderr.write(f"(rank {rank.number} of {len(self._ranks)})\n")
        sys.stderr.flush()
        if code < 0:
            with contextlib.suppress(OSError):  # SIGKILL cannot be set, nor need it be
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
    loop: RankLoop | None,
) -> NoReturn:
    """Run a rank in its own process."""
    phase = WORKER

    def enter(name: str) -> None:
        nonlocal phase
        phase = name
        if settings.rank == 0:
            connection.send(_Phase(name))

    try:
        end_with(parent)
        try:
            facts = member.prepare()
            replica = Replica(settings, member.torch_device)
            replica.join()
            connection.send(facts)
            if loop is not None:
                phase = "measure"
                loop(member, replica, connection)
            configuration, protocol = connection.recv()
            if settings.rank == 0:
                run = lead(configuration, member, protocol, enter, replica, others)
            else:
                enter("create")
                run = follow(configuration, member, replica, others[0])
            connection.send(run)
        except BaseException as error:
            connection.send(explain(error, member, phase))
        signal.pause()  # the exit of this process would break the connections of the others
    except BaseException:  # while sending: the parent reads the output and the status
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)
