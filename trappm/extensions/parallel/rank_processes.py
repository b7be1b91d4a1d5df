"""The rank processes of one measurement: forked, listened to, and ended together.

Their parent is the measuring process. It computes nothing and takes part in no collective, so it
hears of whatever happens to a rank while the others wait for it: one that fails tells how, and one
that dies has the parent die the same death, which its own worker knows how to judge.
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

from trappm.extensions.parallel.replica import RankRun, Replica, Seat, follow, lead
from trappm.profiler.devices.base import StepDevice
from trappm.profiler.errors import DeviceError
from trappm.profiler.host.forks import end_with
from trappm.profiler.measuring.attempt import WORKER, explain
from trappm.profiler.records import Configuration, Outcome, Protocol
from trappm.profiler.steps.meter import Findings

_GRACE_S = 0.2
"""How long after a rank's error another one's death may show, which is what caused it."""


Life = Callable[[StepDevice, Replica, Connection], NoReturn]


@dataclass(frozen=True)
class _Phase:
    name: str


@dataclass(frozen=True)
class _Rank:
    number: int
    pid: int
    process: int
    """A descriptor that is readable once the process has ended."""
    connection: Connection


class RankFamily:
    """Forks a process for each of these devices, which are to share steps.

    Args:
        members: a device for each.
        strategy: how they share a step.
        life: what each does instead of a step: it answers the orders that come over a connection.
    """

    def __init__(
        self, members: Sequence[StepDevice], strategy: str, life: Life | None = None
    ) -> None:
        # In memory, so that no file is left behind; every rank has it by the fork.
        rendezvous = f"/proc/self/fd/{os.memfd_create('trappm-ranks', 0)}"
        pairs: list[tuple[Connection, Connection]] = [Pipe() for _ in members[1:]]
        parent = os.getpid()
        self._ranks: list[_Rank] = []
        self._phase = WORKER
        for rank, member in enumerate(members):
            seat = Seat(rank=rank, ranks=len(members), strategy=strategy, rendezvous=rendezvous)
            ours, theirs = Pipe()
            pid = os.fork()
            if pid == 0:
                ours.close()
                others = [leaders for leaders, _ in pairs] if rank == 0 else [pairs[rank - 1][1]]
                _live(parent, seat, member, theirs, others, life)
            theirs.close()
            self._ranks.append(_Rank(rank, pid, os.pidfd_open(pid), ours))

    def prepare(self) -> list[dict[str, Any]]:
        """What each rank got ready.

        Raises:
            DeviceError: a device cannot be used, or the ranks cannot talk to each other.
        """
        facts: Any = self._hear(lambda name: None)
        if isinstance(facts, Findings):
            raise DeviceError(str(facts.message))
        return list(facts)

    def measure(
        self, configuration: Configuration, protocol: Protocol, enter: Callable[[str], None]
    ) -> list[RankRun] | Findings:
        """What each rank measured, or how the first one failed; all of them have ended then."""
        for rank in self._ranks:
            rank.connection.send((configuration, protocol))
        results: list[RankRun] | Findings = self._hear(enter)
        self._kill()
        return results

    def order(self, *order: Any) -> list[Any] | Findings:
        """What each rank answers in a life of its own, or how the first one failed.

        All of them have ended then.
        """
        for rank in self._ranks:
            rank.connection.send(order)
        self._phase = "measure"
        answers: list[Any] | Findings = self._hear(lambda name: None)
        return answers

    def _hear(self, enter: Callable[[str], None]) -> Any:
        """An answer of each rank, or the failure of one."""
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
                    self._die_like(rank)
                try:
                    answer = ready.recv()
                except EOFError:
                    wait([rank.process])
                    self._die_like(rank)
                if isinstance(answer, _Phase):
                    self._phase = answer.name
                    enter(answer.name)
                elif isinstance(answer, Findings):
                    return self._failure(rank, answer)
                else:
                    answers[rank.number] = answer
        return [answers[rank.number] for rank in self._ranks]

    def _failure(self, rank: _Rank, findings: Findings) -> Findings:
        """What ended the step of all; a rank that died is what others' connections broke at."""
        if findings.outcome is Outcome.ERROR:
            dead = wait([r.process for r in self._ranks], _GRACE_S)
            for other in self._ranks:
                if other.process in dead:
                    self._die_like(other)
        self._kill()
        phase = WORKER if findings.failed_in == WORKER else self._phase
        message = f"rank {rank.number} of {len(self._ranks)}: {findings.message}"
        return replace(findings, failed_in=phase, message=message)

    def _die_like(self, rank: _Rank) -> NoReturn:
        """Ends this process as a rank has ended, which has left no other word."""
        code = os.waitstatus_to_exitcode(os.waitpid(rank.pid, 0)[1])
        self._kill()
        # Said last: the end of what was printed goes into the message.
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


def _live(
    parent: int,
    seat: Seat,
    member: StepDevice,
    connection: Connection,
    others: list[Connection],
    life: Life | None,
) -> NoReturn:
    """A rank's whole life, in its own process."""
    phase = WORKER

    def enter(name: str) -> None:
        nonlocal phase
        phase = name
        if seat.rank == 0:
            connection.send(_Phase(name))

    try:
        end_with(parent)
        try:
            facts = member.prepare()
            replica = Replica(seat, member.torch_device)
            replica.join()
            connection.send(facts)
            if life is not None:
                phase = "measure"
                life(member, replica, connection)
            configuration, protocol = connection.recv()
            if seat.rank == 0:
                run = lead(configuration, member, protocol, enter, replica, others)
            else:
                enter("create")
                run = follow(configuration, member, replica, others[0])
            connection.send(run)
        except BaseException as error:
            connection.send(explain(error, member, phase))
        signal.pause()  # at the end of this process the others would lose their connections
    except BaseException:  # of telling it: the parent reads what is printed, and the status
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)
