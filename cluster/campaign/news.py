"""The progress of a running campaign, and the order to stop that reaches it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trappm.cluster.campaign.progress import LINES_KEPT, Progress
from trappm.profiler.progress import OnProgress

LOOK_S = 1.0
"""How often the store is checked for an order to stop."""


class CampaignStopped(Exception):  # noqa: N818  (an order that was obeyed, not an error)
    """The campaign was asked to stop and has put everything down where resume finds it."""


class News:
    """The progress of a campaign: updated by its loop and its learner's thread.

    Args:
        watch: is called with the progress whenever it changes.
        is_ordered_to_stop: whether somebody in another shell wants the campaign to stop.
    """

    def __init__(
        self, watch: Callable[[Progress], None], is_ordered_to_stop: Callable[[], bool]
    ) -> None:
        self.progress = Progress()
        self.stop = threading.Event()
        self._watch = watch
        self._is_ordered_to_stop = is_ordered_to_stop
        self._next_look = 0.0
        self._lock = threading.Lock()

    def tell(self, stage: str | None = None, *, news: str | None = None, **values: Any) -> None:
        """Updates the stage and its counts, and adds a line of news."""
        with self._lock:
            before = self.progress
            if news:
                values["lines"] = (*before.lines, news)[-LINES_KEPT:]
                values["line_count"] = before.line_count + 1
            if stage is not None and stage != before.stage:
                values = {"done": 0, "total": 0, "current": ()} | values
            self.progress = replace(before, stage=stage or before.stage, **values)
            self._watch(self.progress)

    def check_stop(self) -> None:
        """Raises CampaignStopped if the campaign was asked to stop, by this process or another."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            if self._is_ordered_to_stop():
                self.stop.set()
        if self.stop.is_set():
            raise CampaignStopped

    def on_progress(self, stage: str, *, is_shown: bool = True) -> OnProgress:
        """A callback for long work, which shows progress and raises if the campaign is to stop."""

        def tell(done: int, total: int) -> None:
            self.check_stop()
            if is_shown:
                self.tell(stage, done=done, total=total)

        return tell
