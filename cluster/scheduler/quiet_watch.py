"""Pauses for hosts whose cores other programs use, so that measurements are unstable."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from trappm.cluster.scheduler.messages import AwaitQuiet, Worker

LATEST = 20
"""Recent attempts of a host that count."""
_BETWEEN_PAUSES = 6
"""Attempts of a host before its first pause, and between two."""


@dataclass
class _Host:
    attempts: deque[float | None] = field(default_factory=lambda: deque(maxlen=LATEST))
    """The share of the cores that others used, for each recent attempt that was unstable for it."""
    since_pause: int = 0
    pauses: int = 0
    """Pauses since the host was last quiet."""
    paused_until: float = 0.0


class QuietWatch:
    """Latest attempts on each host; pauses that grow as long as half of them are unstable."""

    def __init__(self, pauses_s: Sequence[float] = (20.0, 40.0, 80.0, 120.0)) -> None:
        self._pauses_s = pauses_s
        self._hosts: dict[str, _Host] = defaultdict(_Host)

    def note(self, worker: Worker, others_share: float | None, time: float) -> AwaitQuiet | None:
        """Note how an attempt ended, and return a pause that is due.

        Args:
            worker: Worker that measured.
            others_share: Share of the cores that other programs used if the attempt was unstable
                for that reason; None if not.
            time: Now, in seconds.
        """
        host = self._hosts[worker.host]
        host.attempts.append(others_share)
        host.since_pause += 1
        shares = [share for share in host.attempts if share is not None]
        if 2 * len(shares) < len(host.attempts):
            host.pauses = 0
            return None
        if others_share is None or host.since_pause < _BETWEEN_PAUSES:
            return None
        seconds = self._pauses_s[min(host.pauses, len(self._pauses_s) - 1)]
        host.pauses += 1
        host.since_pause = 0
        host.paused_until = time + seconds
        return AwaitQuiet(worker, seconds, len(shares), len(host.attempts), fmean(shares))

    def is_paused(self, host: str, time: float) -> bool:
        return host in self._hosts and time < self._hosts[host].paused_until
