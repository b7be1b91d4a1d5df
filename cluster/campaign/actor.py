"""The Ray actor that runs a campaign, with profilers and a learner that are actors as well.

Import this module inside `with ray_runtime(...)` only (see there).
"""

from __future__ import annotations

import platform
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ray
from ray.util.metrics import Counter, Gauge

from trappm.cluster.campaign.campaign import CampaignRunner, CampaignStopped
from trappm.cluster.campaign.learner_handle import LearnerHandle
from trappm.cluster.campaign.process import ownership
from trappm.cluster.campaign.profiler_pool import ProfilerPool
from trappm.cluster.spec import CampaignSpec
from trappm.store import Home, Patience, Store, StoreAccess

REPLY_S = 5.0
"""Time for which a campaign that has ended still answers who asks how."""

COUNTERS = {
    "labels": "Measurements that gave a label.",
    "failures": "Attempts that the step itself failed.",
    "losses": "Attempts whose worker or node was lost or faulty.",
}
GAUGES = {
    "queue": "Assignments that wait for a worker.",
    "workers": "Workers that have joined.",
    "busy_share": "Share of the workers that are at work.",
}


@dataclass(eq=False, repr=False)
class CampaignActor:
    """Runs a campaign in a thread of its own from its start.

    A detached campaign depends on no other process: when Ray restarts it, it continues. With a
    label store on PostgreSQL it may continue on another node.
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
        self._notes: deque[tuple[str, str]] = deque()
        """Kinds and messages, which the campaign records as events once it has begun."""
        self._is_restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._ended: Future[None] = Future()
        threading.Thread(target=self._run_in_thread, name="campaign", daemon=True).start()

    def wait_for_end(self) -> None:
        """Return once the campaign has ended or was stopped; raise its failure."""
        self._ended.result()

    def _run_in_thread(self) -> None:
        try:
            self._run()
            self._ended.set_result(None)
        except BaseException as error:
            self._ended.set_exception(error)
        if self.may_grow:  # on this machine alone it ends with the command that started it
            time.sleep(REPLY_S)
            ray.kill(ray.get_runtime_context().current_actor)

    def _run(self) -> None:
        patience = Patience(tell=partial(self._note, "store"))
        open_store = partial(Store.open, self.access.take_over(), patience)
        with (
            patience(open_store) as opened,
            ownership(opened, self.campaign_id, self._cluster) as store,
        ):
            if store is None:  # it was stopped before it began, or ended without this process
                return
            folder = self._home.campaigns / self.campaign_id
            is_elsewhere = self._is_restarted and not folder.is_dir()
            folder.mkdir(parents=True, exist_ok=True)
            profilers, learner = self._make_profilers(), self._make_learner()
            campaign = CampaignRunner(
                store=store,
                id=self.campaign_id,
                spec=self.spec,
                profilers=profilers,
                learner=learner,
                snapshots=self._home.snapshots,
                notes=self._notes,
                metric=CampaignMetrics(self.campaign_id),
            )
            if is_elsewhere:
                where = (
                    "the encoder is made again, and its snapshot will be in that host's folder "
                    f"{self._home.snapshots}"
                )
                if self.spec.registry is not None:
                    where = f"encoder and snapshot are those of {self.spec.registry}"
                self._note(
                    "resumed",
                    f"its node is gone, and it continues on host {platform.node()}: {where}",
                )
            try:
                campaign.run()
            except CampaignStopped:
                return
            finally:
                profilers.close()  # others wait for the GPUs
                learner.close()

    @property
    def _cluster(self) -> str:
        """Address of the cluster; the host of a private one, whose GPUs others use as well."""
        return ray.get_runtime_context().gcs_address if self.may_grow else platform.node()

    def _make_profilers(self) -> ProfilerPool:
        return ProfilerPool(
            self.spec.devices.keys, may_grow=self.may_grow, tell=partial(self._note, "node")
        )

    def _make_learner(self) -> LearnerHandle:
        device = self.spec.learner_device
        if device is not None and not self.may_grow:
            self._note("learner", f"learner_device {device}: not used on a single machine")
            device = None
        return LearnerHandle(
            tell=partial(self._note, "learner"),
            labels=self.spec.total,
            device=device,
            preset=self.spec.learner,
            strategy=self.spec.learner_strategy,
            cost=self.spec.cost,
            source=self.spec.devices.source,
            seed=self.spec.seed,
            cache=self.spec.registry or self._home.campaigns / self.campaign_id,
        )

    def _note(self, kind: str, message: str) -> None:
        self._notes.append((kind, message))


class CampaignMetrics:
    """Metrics `trappm_labels_total`, `trappm_queue` ... of one campaign, by device.

    Prometheus and Ray's dashboard read them. Ray exports each under the prefix `ray_`, on the
    metrics port of the campaign's node.
    """

    def __init__(self, campaign_id: str) -> None:
        tags = ("campaign", "device")
        self._counters = {
            name: Counter(f"trappm_{name}_total", description=text, tag_keys=tags)
            for name, text in COUNTERS.items()
        }
        self._gauges = {
            name: Gauge(f"trappm_{name}", description=text, tag_keys=tags)
            for name, text in GAUGES.items()
        }
        self._campaign_id = campaign_id

    def __call__(self, name: str, device: str, value: float) -> None:
        """Add to a counter, or set a gauge."""
        tags = {"campaign": self._campaign_id, "device": device}
        if name in self._counters:
            self._counters[name].inc(value, tags=tags)
        else:
            self._gauges[name].set(value, tags=tags)
