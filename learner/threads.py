"""The heads of a device side by side, each in a thread with one core for its products of matrices.

Products of matrices and XGBoost's trees run outside of Python's lock, and heads share nothing that
they write, so two cores train memory and step times in little more than the longer of both takes
(docs/studies/learner_speed.md). Threads *within* products and folds cost more than they saved.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch
from threadpoolctl import threadpool_limits

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """What `work` returns for each item, in order; as many at once as there are cores.

    `work` must not draw from a generator that another item draws from, so that results do not
    depend on the number of cores. What it raises is raised here, once those that run have ended.
    """
    with _one_thread_each(), ThreadPoolExecutor(os.cpu_count() or 1, "trappm-learner") as threads:
        yield from threads.map(work, items)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Inside, no product of matrices takes more than one thread, in whichever library."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)
