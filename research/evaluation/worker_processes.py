"""Worker processes of this machine: one thread each, and never there without who started them."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")

_PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def worker_pool(
    processes: int, begin: Callable[..., None] | None = None, *given: Any
) -> Iterator[ProcessPoolExecutor]:
    """So many fresh processes, which end with the block; at once, if it ends with an exception.

    Args:
        processes: how many at most.
        begin: called in each with `given`, before its first task.
    """
    others = set(multiprocessing.active_children())
    workers = ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(os.getpid(), begin, given),
    )
    try:
        yield workers
    except BaseException:  # nobody waits for what they are at
        for worker in set(multiprocessing.active_children()) - others:
            worker.kill()
        raise
    finally:
        workers.shutdown(cancel_futures=True)


def submit(
    workers: ProcessPoolExecutor,
    function: Callable[Given, Result],
    *args: Given.args,
    **kwargs: Given.kwargs,
) -> Future[Result]:
    """Hands out a task; a worker that this starts sees no Ctrl-C, and so shows no trace of one."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with _one_thread():
            return workers.submit(function, *args, **kwargs)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """What is started within computes with one thread: NumPy asks when it is imported, which may be
    before a worker runs anything of ours."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _begin(parent: int, begin: Callable[..., None] | None, given: tuple[Any, ...]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before it could take us along
    import torch

    torch.set_num_threads(1)
    if begin is not None:
        begin(*given)
