"""Makes the graphs of many architectures at once, in processes of this machine.

One graph is single-threaded work of a second or so, mostly Python, so each worker process has one
thread. A worker that a model takes down costs that model only: who was at work when it died is
tried again, alone, and who dies alone is refused.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from types import FrameType

from cluster.crew import ProfiledGraph
from profiler.errors import TrappmError

CPU_LIMIT_S = 600
"""CPU time after which a graph is given up; the slowest that we know takes a twentieth of it."""

_TASKS_PER_WORKER = 200
"""On average; then fresh workers go on, so that what libraries keep in memory cannot pile up."""

_PR_SET_PDEATHSIG = 1

Pair = tuple[str, int]


def profile_graph(architecture: str, input_size: int) -> ProfiledGraph:
    """The static profile of an architecture at an input size, or why there is none."""
    from profiler.static import graph_template

    try:
        template = graph_template(architecture, input_size)
    except TrappmError as error:
        return ProfiledGraph(architecture, input_size, None, str(error))
    return ProfiledGraph(architecture, input_size, template.to_bytes(), None)


def profile_in_processes(pairs: Sequence[Pair], processes: int) -> Iterator[ProfiledGraph]:
    """Static profiles in the order of completion; a pair that ends its process is refused.

    The workers end with this process, whatever ends it, and at once with a Ctrl-C.
    """
    suspects: list[Pair] = []
    remaining = list(reversed(pairs))
    while remaining:
        batch = remaining[-processes * _TASKS_PER_WORKER :]
        del remaining[-len(batch) :]
        with _workers(min(processes, len(batch))) as workers:
            yield from _profile_all(workers, batch, suspects, processes)
        remaining += batch  # what a dying worker has left over
    for pair in suspects:
        with _workers(1) as workers:
            try:
                yield workers.submit(_profile_limited, *pair).result()
            except BrokenProcessPool:
                yield ProfiledGraph(*pair, None, "the static profile ended its process")


def _profile_all(
    workers: ProcessPoolExecutor, batch: list[Pair], suspects: list[Pair], processes: int
) -> Iterator[ProfiledGraph]:
    """Takes from the batch until nothing is left; if a worker dies, names suspects and returns."""
    running: dict[Future[ProfiledGraph], Pair] = {}
    try:
        while batch or running:
            # No more than are at work, so that the suspects of a death are few.
            while batch and len(running) < processes:
                running[workers.submit(_profile_limited, *batch[-1])] = batch[-1]
                batch.pop()
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                profiled = future.result()
                del running[future]
                yield profiled
    except BrokenProcessPool:
        suspects += running.values()


def _workers(processes: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin_worker,
        initargs=(os.getpid(),),
    )


def _begin_worker(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before it could take us along
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C needs no trace from every worker
    signal.signal(signal.SIGPROF, _give_up)
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)


def _profile_limited(architecture: str, input_size: int) -> ProfiledGraph:
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
    try:
        return profile_graph(architecture, input_size)
    except _TooLong:
        reason = f"the static profile took more than {CPU_LIMIT_S} s of CPU time"
        return ProfiledGraph(architecture, input_size, None, reason)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


class _TooLong(BaseException):
    """Passes through every `except Exception` of libraries."""


def _give_up(_signal: int, _frame: FrameType | None) -> None:
    raise _TooLong
