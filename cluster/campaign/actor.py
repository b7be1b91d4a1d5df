"""The Ray actor that runs a campaign, with profilers and a learner that are actors as well.

Import this module inside `with ray_runtime(...)` only (see there).
"""

from __future__ import annotations

import platform
import threading
import time
import uuid
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray

from trappm.cluster.actors.learner import LearnerHandle
from trappm.cluster.actors.profiler_pool import ProfilerPool
from trappm.cluster.campaign.campaign import Campaign, CampaignStopped
from trappm.cluster.campaign.ownership import ownership
from trappm.cluster.campaign.progress import Progress
from trappm.cluster.spec import CampaignSpec
from trappm.store import CampaignState, Home, Patience, Store, StoreAccess

LINGER_S = 60.0
"""Time for which a detached campaign that has ended replies to watchers."""


@dataclass(eq=False, repr=False)
class CampaignActor:
    """Runs a campaign in a thread of its own from its start.

    A detached campaign depends on no other process: when Ray restarts it, it continues on another
    node if its own is gone.
    """

    home: Path
    """The data folder."""
    access: StoreAccess
    """Access to the label store, as the launching shell has it. It may hold a password, so it is
    not part of the environment, which Ray would show."""
    campaign_id: str
    spec: CampaignSpec
    may_grow: bool
    """True if it is detached, on a cluster that nodes may join."""

    def __post_init__(self) -> None:
        self._home = Home(self.home)
        self._progress = Progress()
        self._campaign: Campaign | None = None
        self._stop = threading.Event()
        self._life = uuid.uuid4().hex
        self._is_restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._ended: Future[bool] = Future()
        threading.Thread(target=self._live, name="campaign", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()
        if self._campaign is not None:
            self._campaign.stop()

    def progress(self, life: str, lines_seen: int) -> dict[str, Any]:
        """Return the progress with unseen lines, and whether the campaign has begun and ended.

        Args:
            life: Id of this process from the last reply; lines of an earlier process do not count.
            lines_seen: Number of lines that the watcher has seen.
        """
        progress, ended = self._progress, self._ended.done()
        lines = progress.lines_after(lines_seen if life == self._life else 0)
        return {
            "life": self._life,
            "begun": self._campaign is not None or ended,
            "ended": ended,
            "lines_seen": progress.line_count,
            "progress": asdict(replace(progress, lines=lines)),
        }

    def result(self) -> bool:
        """Return whether it ran to its end, False if it was stopped; raise its failure."""
        return self._ended.result()

    def _live(self) -> None:
        try:
            self._ended.set_result(self._run())
        except BaseException as error:
            self._ended.set_exception(error)
        if self.may_grow:  # on this machine alone it ends with the command that started it
            time.sleep(LINGER_S)
            ray.kill(ray.get_runtime_context().current_actor)

    def _run(self) -> bool:
        patience = Patience(tell=partial(self._note, "store"))
        open_store = partial(Store.open, self.access.take_over(), patience)
        with (
            patience(open_store) as opened,
            ownership(opened, self.campaign_id, outlasts=self._is_restarted) as store,
        ):
            if store is None:  # it was stopped before it began, or ended without this process
                return opened.campaigns.state(self.campaign_id) is CampaignState.FINISHED
            folder = self._home.campaigns / self.campaign_id
            is_elsewhere = self._is_restarted and not folder.is_dir()
            folder.mkdir(parents=True, exist_ok=True)
            self._campaign = Campaign(
                store=store,
                id=self.campaign_id,
                spec=self.spec,
                workers=self._workers(),
                learner=self._learner(),
                snapshots=self._home.snapshots,
                watch=self._watch,
            )
            if is_elsewhere:
                self._campaign.note(
                    "resumed",
                    f"its node is gone, and it continues on host {platform.node()}: the encoder is "
                    "made again, and its snapshot will be in that host's folder "
                    f"{self._home.snapshots}",
                )
            if self._stop.is_set():
                self._campaign.stop()
            try:
                self._campaign.run()
            except CampaignStopped:
                return False
            return True

    def _workers(self) -> ProfilerPool:
        return ProfilerPool(
            self.spec.devices.keys, may_grow=self.may_grow, tell=partial(self._note, "node")
        )

    def _learner(self) -> LearnerHandle:
        return LearnerHandle(
            tell=partial(self._note, "learner"),
            labels=self.spec.total,
            preset=self.spec.learner,
            strategy=self.spec.learner_strategy,
            cost=self.spec.cost,
            source=self.spec.devices.source,
            seed=self.spec.seed,
            cache=self._home.campaigns / self.campaign_id,
        )

    def _watch(self, progress: Progress) -> None:
        self._progress = progress

    def _note(self, kind: str, message: str) -> None:
        """Report an event; before the campaign begins, only to watchers."""
        if self._campaign is not None:
            self._campaign.note(kind, message)
        else:
            lines = (*self._progress.lines, message)
            self._progress = Progress(stage="label store", lines=lines, line_count=len(lines))
