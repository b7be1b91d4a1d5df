"""The heads of a device side by side, each in a thread with one core for its products of matrices.

Products of matrices and XGBoost's trees run outside of Python's lock, and all that heads share are
caches, whose entries are the same whoever writes them. So two cores train memory and step times in
little more than the longer of both takes (docs/research/learner_speed.md).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import TypeVar

import torch
from threadpoolctl import threadpool_limits

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """What `work` returns for each item, in order; as many at once as there are cores.

    `work` must not draw from a generator that another item draws from, so that results do not
    depend on the number of cores. What it raises is raised here; that, like an end from outside,
    waits for the items that are being worked on.
    """
    if items:
        with _ONE_THREAD.held(), ThreadPoolExecutor(os.cpu_count() or 1, "trappm-learner") as pool:
            yield from pool.map(work, items)


class _OneThread:
    """While anyone holds it, no product of matrices takes more than one thread of this process.

    The numbers of threads belong to the whole process, so the first to come lowers them and the
    last to go puts them back, in whichever order they come and go.
    """

    def __init__(self) -> None:
        self._lock, self._holders, self._restore = Lock(), 0, ExitStack()

    @contextmanager
    def held(self) -> Iterator[None]:
        with self._lock:
            self._holders += 1
            if self._holders == 1:
                self._restore.callback(torch.set_num_threads, torch.get_num_threads())
                torch.set_num_threads(1)
                self._restore.enter_context(threadpool_limits(1))
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if not self._holders:
                    self._restore.close()


_ONE_THREAD = _OneThread()
