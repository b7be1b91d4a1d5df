"""Folds that never divide an architecture: its batch sizes are near-copies of each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def grouped_folds(
    groups: Sequence[str], count: int, generator: np.random.Generator
) -> npt.NDArray[np.int64]:
    """The fold of each of n labels (n): architectures dealt out at random, none divided.

    Labels of one single architecture are dealt out one by one: near-copies are better than nothing.

    Args:
        groups: the architecture of each label (n).
        count: of folds, as long as there are so many architectures.
        generator: deals them out.
    """
    if not len(groups):
        return np.zeros(0, np.int64)
    names, number = np.unique(np.array(groups), return_inverse=True)
    if len(names) == 1:
        number = np.arange(len(groups))
    order = generator.permutation(int(number.max()) + 1)
    folds: npt.NDArray[np.int64] = (order[number] % min(count, len(order))).astype(np.int64)
    return folds
