"""Parallel training of the heads of a device, one thread with one core per head.

Matrix products and XGBoost release the global interpreter lock. Heads share only caches with
deterministic entries. Two cores train memory and step time in little more than the longer of the
two takes (docs/research/learner_speed.md).
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
    """Yield the result of `work` for each item, in order, with one thread per core.

    Items must not share a random generator, so that results do not depend on the number of cores.
    Exceptions of `work` propagate after the running items have finished.
    """
    if items:
        with _ONE_THREAD.held(), ThreadPoolExecutor(os.cpu_count() or 1, "trappm-learner") as pool:
            yield from pool.map(work, items)


class _OneThread:
    """Reference-counted limit of one thread per matrix product in this process.

    Thread numbers belong to the whole process: the first holder lowers them, the last restores
    them.
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
