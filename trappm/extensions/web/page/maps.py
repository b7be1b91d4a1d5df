"""Maps of campaigns' pools, each worked out once for a state of the store.

A map needs the encoder and the next choice of the acquisition, which takes seconds: one thread does
it, and requests meanwhile get 202, to ask again. It holds the lock of this host's cores, as a
measurement on them does, so that neither disturbs the other.
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
"""So many of the next picks are shown."""
MOST_POINTS = 3_000
KEPT = 16
PATIENCE_S = 3.0
"""A request waits so long before it is answered with 202."""

LOCK_TIMEOUT_S = 120.0
"""A measurement on these cores that takes longer than this is not waited for."""

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
        """The current map of a campaign; None while it is worked out.

        Raises:
            InputError: no such campaign or device, or nothing is encoded yet.
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
            if future.done():  # it is what the work itself ended with
                self._forget(key)
                raise
            return None
        except Exception:
            self._forget(key)  # the next question may find it mended
            raise

    def _forget(self, key: _Key) -> None:
        with self._lock:
            self._maps.pop(key, None)


def _explained(home: Home, campaign_id: str, device: str | None) -> dict[str, Any]:
    """The explanation of a campaign, with each point's reason, thinned to what a page can draw."""
    from trappm.label_store import store_to_read
    from trappm.reports.choices import PastChoice, WantedChoice, explain

    with store_to_read(home) as store, _nobody_measures_here():
        explanation = explain(store, home, campaign_id, device=device, count=WANTED)
        devices = list(store.assignments.counts(campaign_id))
    choices: list[PastChoice | WantedChoice] = [*explanation.chosen, *explanation.wanted]
    reasons = {choice.configuration: choice for choice in choices}
    points = []
    for point in _thinned(explanation.map):
        about = reasons.get(point.configuration)
        in_round = about.round if isinstance(about, PastChoice) else None
        points.append(
            {
                **asdict(point),
                "family": family_of(point.configuration.split()[0]),
                "round": in_round,
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
def _nobody_measures_here() -> Iterator[None]:
    """While it is held, measurements on this host's cores wait.

    Raises:
        TrappmError: one of them does not come to an end.
    """
    from filelock import FileLock, Timeout

    from trappm.profiler.measuring.attempt import LOCK_DIR, lock_path

    try:
        with FileLock(lock_path(LOCK_DIR, "cpu"), timeout=LOCK_TIMEOUT_S):
            yield
    except Timeout as error:
        raise TrappmError(
            "the cores of this host are measured on; look at the map again when that has ended"
        ) from error


def _thinned(points: Sequence[MapPoint]) -> list[MapPoint]:
    """At most so many points: those that nothing was asked of go first, evenly."""
    from trappm.reports.choices import BACKGROUND

    background = [p for p in points if p.kind in BACKGROUND]
    others = [p for p in points if p.kind not in BACKGROUND][-MOST_POINTS:]
    room = MOST_POINTS - len(others)
    if len(background) > room:
        background = [background[i * len(background) // room] for i in range(room)]
    return background + others
