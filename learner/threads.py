"""The same work on several items, on as many cores as the learner has.

Products of matrices and XGBoost's trees run outside of Python's lock, what is between them does
not, so the gain is small (docs/studies/learner_speed.md). Nothing is copied to another process, and
results do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """What `work` returns for each item, in order; as many at once as torch has threads.

    `work` must draw no random numbers from a generator that others draw from.
    """
    with ThreadPoolExecutor(torch.get_num_threads(), "trappm-learner") as threads:
        return list(threads.map(work, items))
