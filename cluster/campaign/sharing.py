"""The rule by which campaigns of one label store share the GPUs of a cluster.

A campaign takes as many GPUs of a kind as it has work for, up to its `max_workers`. When others
have work for the same kind, each has an equal share. A campaign that has more than its share gives
a GPU up, once its measurement has ended, for each one that another campaign lacks of its own share.
So no GPU is idle while anybody has work for it, and the second of two campaigns begins within a
measurement of the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Need:
    """Work of one campaign on one device."""

    waiting: int
    leased: int
    max_workers: int

    @property
    def workers(self) -> int:
        """Number of workers that it could use."""
        return min(self.waiting + self.leased, self.max_workers)


def most_workers(mine: Need, others: Iterable[Need], gpus: int) -> int:
    """Return how many workers a campaign may have on a device.

    Args:
        mine: The campaign's own work.
        others: Work of the other campaigns that run, of the same label store.
        gpus: Number of workers that the cluster has room for; 0 while unknown.
    """
    rivals = [need for need in others if need.workers]
    if not rivals or not gpus:
        return mine.max_workers
    share = math.ceil(gpus / (1 + len(rivals)))
    lacking = sum(max(min(need.workers, share) - need.leased, 0) for need in rivals)
    if not lacking:
        return mine.max_workers
    return min(mine.max_workers, max(share, mine.leased - lacking))
