"""The Ray actors: profilers, the learner, and the campaign that drives them.

Thin shells: what they do stands in `profiler`, `learning` and `campaign`. They are plain classes;
who starts one makes an actor of it with `ray.remote`. Import this module inside
`runtime.ray_runtime` only (see there).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ray

from cluster.campaign import Campaign, CampaignStopped
from cluster.learning import CampaignLearner
from cluster.lock import campaign_lock
from cluster.progress import Progress
from cluster.ray_crew import LearnerProxy, RayCrew
from cluster.spec import CampaignSpec
from profiler.records import Configuration, Measurement
from profiler.records import Protocol as MeasuringProtocol


class ProfilerActor:
    """Measures on one device of the node that it runs on, one configuration at a time."""

    def __init__(self, device: str) -> None:
        from profiler.isolation import Measurer

        self._device = device
        self._measurer = Measurer()
        self._measurer.__enter__()

    def describe(self) -> dict[str, str]:
        """Host and software fingerprint, which decide what may run beside and be mixed."""
        from profiler.devices import open_device
        from profiler.environment import stack_fingerprint

        environment = open_device(self._device).environment()
        node_id = ray.get_runtime_context().get_node_id()
        return {"host": node_id, "fingerprint": stack_fingerprint(environment)}

    def measure(
        self, configuration: Configuration, protocol: MeasuringProtocol, attempt_key: str
    ) -> Measurement:
        return self._measurer.measure(
            configuration, self._device, protocol, attempt_key=attempt_key
        )


class LearnerActor:
    """Holds the pool's graphs, the encoder and the heads; a second thread answers for progress."""

    def __init__(self, preset: str, strategy: str, source: str, seed: int, cache: Path) -> None:
        self._learner = CampaignLearner(
            preset=preset, strategy=strategy, source=source, seed=seed, cache=cache
        )
        self._progress = (0, 0)

    def progress(self) -> tuple[int, int]:
        return self._progress

    def call(self, method: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        self._progress = (0, 0)
        if method in {"set_pool", "fit"}:
            keywords = {**keywords, "on_progress": self._note}
        return getattr(self._learner, method)(*arguments, **keywords)

    def _note(self, done: int, total: int) -> None:
        self._progress = (done, total)


class CampaignActor:
    """Runs a campaign in one thread and answers its watchers in another."""

    def __init__(self, home: Path, campaign_id: str, spec: CampaignSpec) -> None:
        self._home_path = home
        self._campaign_id = campaign_id
        self._spec = spec
        self._progress = Progress()
        self._campaign: Campaign | None = None
        self._stop = threading.Event()

    def run(self) -> bool:
        """Runs to the end; False when it was stopped on its way."""
        from store import Home, Store

        home = Home(self._home_path)
        spec = self._spec
        with campaign_lock(home, self._campaign_id), Store.open(home.database_url) as store:
            crew = RayCrew(spec.devices.keys)
            learner = LearnerProxy(
                preset=spec.learner,
                strategy=spec.strategy,
                source=spec.devices.source,
                seed=spec.seed,
                cache=home.campaigns / self._campaign_id,
            )
            self._campaign = Campaign(
                store=store,
                campaign_id=self._campaign_id,
                spec=spec,
                crew=crew,
                learner=learner,
                snapshots=home.snapshots,
                watch=self._watch,
            )
            if self._stop.is_set():
                self._campaign.stop()
            try:
                self._campaign.run()
            except CampaignStopped:
                return False
            return True

    def stop(self) -> None:
        self._stop.set()
        if self._campaign is not None:
            self._campaign.stop()

    def progress(self, lines_seen: int) -> dict[str, Any]:
        """The progress, with only the lines that the watcher has not seen."""
        progress = self._progress
        return asdict(replace(progress, lines=progress.lines[lines_seen:]))

    def _watch(self, progress: Progress) -> None:
        self._progress = progress
