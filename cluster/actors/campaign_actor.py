"""The Ray actor that runs a campaign, with profilers and a learner that are actors as well.

A plain class; who starts one makes an actor of it with `ray.remote`. Import this module inside
`with ray_runtime(...)` only (see there).
"""

from __future__ import annotations

import platform
import threading
import time
import uuid
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray

from trappm.cluster.actors.learner import LearnerHandle
from trappm.cluster.actors.profiler_pool import ProfilerPool
from trappm.cluster.campaign.loop import Campaign, CampaignStopped
from trappm.cluster.campaign.ownership import ownership
from trappm.cluster.campaign.progress import Progress
from trappm.cluster.interfaces import Learner, Workers
from trappm.cluster.profiles.step_profiles import StepCache
from trappm.cluster.spec import CampaignSpec
from trappm.store import CampaignState, Home, Patience, Store, StoreAccess

LINGER_S = 60.0
"""How long a detached campaign that has ended answers its watchers."""


class CampaignActor:
    """Runs a campaign in a thread of its own, from the moment that it is there.

    So a detached one needs nobody: when Ray starts it again after it was killed, it goes on. If its
    node is gone, that may be on another one.

    Args:
        home: the data folder.
        access: to the label store, as the shell that launched it has it. An argument, and not an
            environment that Ray would show to everybody: it may hold a password.
        campaign_id: which campaign.
        spec: of the campaign.
        may_grow: it is detached, on a cluster that nodes may join later.
    """

    def __init__(
        self, home: Path, access: StoreAccess, campaign_id: str, spec: CampaignSpec, may_grow: bool
    ) -> None:
        self._home = Home(home)
        self._access = access
        self._campaign_id = campaign_id
        self._spec = spec
        self._may_grow = may_grow
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
        """The progress, with only the lines that the watcher has not seen; whether it began, ended.

        Args:
            life: from the last answer; lines seen in an earlier life do not count.
            lines_seen: how many, in all.
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
        """Whether it ran to its end; False when it was stopped on its way. Raises why it failed."""
        return self._ended.result()

    def _live(self) -> None:
        try:
            self._ended.set_result(self._run())
        except BaseException as error:
            self._ended.set_exception(error)
        if self._may_grow:  # on this machine alone it ends with the command that started it
            time.sleep(LINGER_S)
            ray.kill(ray.get_runtime_context().current_actor)

    def _run(self) -> bool:
        patience = Patience(tell=self._note_store)
        open_store = partial(Store.open, self._access.take_over(), patience)
        with (
            patience(open_store) as opened,
            ownership(opened, self._campaign_id, outlasts=self._is_restarted) as store,
        ):
            if store is None:  # it was stopped before it began, or ended while this was not there
                return opened.campaigns.state(self._campaign_id) is CampaignState.FINISHED
            folder = self._home.campaigns / self._campaign_id
            is_elsewhere = self._is_restarted and not folder.is_dir()
            folder.mkdir(parents=True, exist_ok=True)
            self._campaign = Campaign(
                store=store,
                campaign_id=self._campaign_id,
                spec=self._spec,
                workers=self._workers(),
                learner=self._learner(),
                snapshots=self._home.snapshots,
                steps=StepCache(self._home.step_profiles),
                watch=self._watch,
            )
            if is_elsewhere:
                self._campaign.note(
                    "resumed",
                    f"its node is gone, and it goes on on host {platform.node()}: encoder and step "
                    "profiles are made again, and its snapshot will be in that host's folder "
                    f"{self._home.snapshots}",
                )
            if self._stop.is_set():
                self._campaign.stop()
            try:
                self._campaign.run()
            except CampaignStopped:
                return False
            return True

    def _workers(self) -> Workers:
        return ProfilerPool(
            self._spec.devices.keys,
            may_grow=self._may_grow,
            tell=self._note_worker,
        )

    def _learner(self) -> Learner:
        return LearnerHandle(
            tell=self._note_learner,
            labels=self._spec.total,
            preset=self._spec.learner,
            strategy=self._spec.strategy,
            source=self._spec.devices.source,
            seed=self._spec.seed,
            cache=self._home.campaigns / self._campaign_id,
        )

    def _watch(self, progress: Progress) -> None:
        self._progress = progress

    def _note_store(self, message: str) -> None:
        if self._campaign is not None:
            self._campaign.note("store", message)
        else:  # it is not open yet
            lines = (*self._progress.lines, message)
            self._progress = Progress(stage="label store", lines=lines, line_count=len(lines))

    def _note_worker(self, message: str) -> None:
        if self._campaign is not None:
            self._campaign.note("node", message)

    def _note_learner(self, message: str) -> None:
        if self._campaign is not None:
            self._campaign.note("learner", message)
