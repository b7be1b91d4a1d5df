"""Maps of campaigns' pools, computed once per state of the store.

A map needs the encoder and the next acquisition, which takes seconds. One thread computes it, and
requests get status 202 in the meantime. The computation holds the lock of this host's cores like a
measurement, so that they do not disturb each other.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from trappm.profiler.errors import TrappmError
from trappm.profiler.models.families import family_of

if TYPE_CHECKING:
    from trappm.reports.choices import MapPoint
    from trappm.store import Home, Store

WANTED = 10
"""Number of next acquisitions in a map."""
MOST_POINTS = 3_000
KEPT = 16
PATIENCE_S = 3.0
"""Time that a request waits before it gets status 202."""
LOCK_TIMEOUT_S = 120.0
"""Longest wait for a measurement on the same cores."""

_Key = tuple[str, str | None, str]


class Maps:
    """Maps by campaign, device and the state of its assignments."""

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="maps")
        self._maps: OrderedDict[_Key, Future[dict[str, Any]]] = OrderedDict()
        self._lock = threading.Lock()

    def find(
        self, store: Store, home: Home, campaign_id: str, device: str | None
    ) -> dict[str, Any] | None:
        """Return the current map of a campaign; None while it is being computed.

        Raises:
            InputError: The campaign or device does not exist, or nothing is encoded yet.
        """
        counts = store.assignments.counts(store.campaigns.get(campaign_id).id)
        key = campaign_id, device, f"{home.path} {counts}"
        with self._lock:
            if key not in self._maps:
                self._maps[key] = self._worker.submit(_explained, home, campaign_id, device)
                while len(self._maps) > KEPT:
                    self._maps.popitem(last=False)[1].cancel()
            future = self._maps[key]
        try:
            return future.result(timeout=PATIENCE_S)
        except TimeoutError:
            if future.done():  # the computation itself timed out
                self._forget(key)
                raise
            return None
        except Exception:
            self._forget(key)  # the next request may succeed
            raise

    def _forget(self, key: _Key) -> None:
        with self._lock:
            self._maps.pop(key, None)


def _explained(home: Home, campaign_id: str, device: str | None) -> dict[str, Any]:
    """Return the explanation of a campaign, with a reason per point, thinned for the page."""
    from trappm.label_store import store_to_read
    from trappm.reports.choices import explain

    with store_to_read(home) as store, _without_measurements():
        explanation = explain(store, home, campaign_id, device=device, count=WANTED)
        devices = list(store.assignments.counts(campaign_id))
    choices = [*explanation.chosen, *explanation.wanted]
    reasons = {choice.configuration: choice for choice in choices}
    points = []
    for point in _thinned(explanation.map):
        about = reasons.get(point.configuration)
        points.append(
            {
                **asdict(point),
                "family": family_of(point.configuration.split()[0]),
                "round": about.round if about else None,
                "reason": about.reason if about else {},
            }
        )
    return {
        "campaign": explanation.campaign,
        "device": explanation.device,
        "devices": devices,
        "strategy": explanation.strategy,
        "points": points,
        "left_out": len(explanation.map) - len(points),
        "wanted": [asdict(choice) for choice in explanation.wanted],
    }


@contextlib.contextmanager
def _without_measurements() -> Iterator[None]:
    """Block measurements on this host's cores.

    Raises:
        TrappmError: A measurement takes longer than `LOCK_TIMEOUT_S`.
    """
    from filelock import FileLock, Timeout

    from trappm.profiler.measuring.attempt import LOCK_DIR, lock_path

    try:
        with FileLock(lock_path(LOCK_DIR, "cpu"), timeout=LOCK_TIMEOUT_S):
            yield
    except Timeout as error:
        raise TrappmError(
            "a measurement is using the cores of this host; reload the map when it has ended"
        ) from error


def _thinned(points: Sequence[MapPoint]) -> list[MapPoint]:
    """Return at most `MOST_POINTS` points, after thinning the background evenly."""
    from trappm.reports.choices import BACKGROUND

    background = [p for p in points if p.kind in BACKGROUND]
    others = [p for p in points if p.kind not in BACKGROUND][-MOST_POINTS:]
    room = MOST_POINTS - len(others)
    if len(background) > room:
        background = [background[i * len(background) // room] for i in range(room)]
    return background + others
