"""The campaign's learner, provided by a Ray actor."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from trappm.cluster.actors.learner_actor import LearnerActor
from trappm.cluster.profiles.step_profiles import StepKey
from trappm.cluster.ray_runtime import first_line, here, memory_here
from trappm.cluster.scheduler.training_report import TrainingReport
from trappm.cluster.workers.interfaces import (
    Choice,
    ChoiceRequest,
    PublishedSnapshot,
    TrainingLabel,
)
from trappm.profiler.errors import CampaignError, TrappmError
from trappm.profiler.kernels.kernel_measurement import KernelMeasurement
from trappm.profiler.progress import OnProgress
from trappm.profiler.records import Configuration

POLL_S = 0.2

START_S = 60.0
"""Seconds after which a learner that has not started is waiting for memory."""

LIVES = 3
"""A learner that dies, such as of too little memory, may die so many times less one in one call."""

BASE_BYTES, LABEL_BYTES = 1 << 30, 160 << 10
"""Memory that a learner requests, and the part for each label of the campaign. Measured peaks are
0.7 GiB with 600 labels, 1.4 GiB with 5,000 and 6.8 GiB with 50,000 (docs/studies/learner_speed.md).
"""

THREADS_THAT_SLEEP = {"OMP_WAIT_POLICY": "passive"}
"""Of OpenMP, while they wait for each other: fits are thousands of small operations, and where
others need the cores too, threads that spin take ten times as long."""

TORCH_OUT_OF_MEMORY = "can't allocate memory"


class LearnerProxy:
    """The learner actor behind the loop's `Learner` interface.

    A learner that died is started again, gets what the dead one knew (its encoder is on disk, its
    heads are trained again), and then the call that killed the other.

    Args:
        tell: called with a line of news when it died.
        labels: how many the campaign is to have, which says how much memory it requests. Learners
            that do not fit into their node's memory together start one after the other.
        learner: the class of the actor.
        arguments: of that class.
    """

    def __init__(
        self,
        *,
        tell: Callable[[str], None],
        labels: int,
        learner: type[Any] = LearnerActor,
        **arguments: Any,
    ) -> None:
        self._class = ray.remote(learner)
        self._arguments = arguments
        self._tell = tell
        self._memory_bytes = memory_here(BASE_BYTES + LABEL_BYTES * labels)
        self._pool: Sequence[tuple[Configuration, bytes]] = ()
        self._profiles: Mapping[str, Any] = {}
        self._taught: Mapping[str, Any] | None = None
        self._actor = self._start()

    def set_pool(
        self,
        pool: Sequence[tuple[Configuration, bytes]],
        on_progress: OnProgress,
        steps: Mapping[tuple[str, int], bytes] | None = None,
        traced: Mapping[StepKey, bytes] | None = None,
    ) -> None:
        self._call("set_pool", pool, steps=steps, traced=traced, on_progress=on_progress)
        self._pool = pool
        self._profiles = {"steps": steps, "traced": traced}

    def fit(
        self,
        labels: Sequence[TrainingLabel],
        on_progress: OnProgress,
        kernels: Mapping[str, Sequence[KernelMeasurement]],
    ) -> TrainingReport:
        known = {"labels": labels, "kernels": kernels}
        report: TrainingReport = self._call("fit", on_progress=on_progress, **known)
        self._taught = known
        return report

    def choose(self, request: ChoiceRequest) -> Sequence[Choice]:
        choices: Sequence[Choice] = self._call("choose", request)
        return choices

    def publish(self, registry: Path, fields: Mapping[str, Any]) -> PublishedSnapshot:
        published: PublishedSnapshot = self._call("publish", registry, fields)
        return published

    def promote(self, registry: Path, snapshot_id: str) -> str | None:
        kept: str | None = self._call("promote", registry, snapshot_id)
        return kept

    def _start(self) -> Any:
        options = {
            **here(),
            "memory": self._memory_bytes,
            "max_concurrency": 2,
            "runtime_env": {"env_vars": THREADS_THAT_SLEEP},
        }
        return self._class.options(**options).remote(**self._arguments)

    def _call(
        self, method: str, *arguments: Any, on_progress: OnProgress | None = None, **keywords: Any
    ) -> Any:
        deaths = 0
        while True:
            try:
                if deaths:
                    self._revive(method)
                return self._ask(method, arguments, keywords, on_progress)
            except _DiedError as error:
                deaths += 1
                if deaths == LIVES:
                    raise CampaignError(
                        f"the learner died {LIVES} times, the last time in {method} ({error}); "
                        "nothing recorded is lost. See that its node has memory to spare, then go "
                        "on with: trappm campaign resume"
                    ) from error
                self._tell(f"the learner died in {method} ({error}); it is started again")

    def _revive(self, method: str) -> None:
        ray.kill(self._actor)  # if it only ran out of memory
        self._actor = self._start()
        if method != "set_pool" and self._pool:
            self._ask("set_pool", (self._pool,), self._profiles)
            if method != "fit" and self._taught is not None:
                self._ask("fit", (), self._taught)

    def _ask(
        self,
        method: str,
        arguments: Sequence[Any],
        keywords: Mapping[str, Any],
        on_progress: OnProgress | None = None,
    ) -> Any:
        try:
            self._wait_for_start(on_progress)
            reference = self._actor.call.remote(method, arguments, keywords)
            while not ray.wait([reference], timeout=POLL_S)[0]:
                if on_progress is not None:
                    on_progress(*ray.get(self._actor.progress.remote()))
            return ray.get(reference)
        except RayActorError as error:
            raise _DiedError(first_line(error)) from error
        except RayTaskError as error:
            if isinstance(error.cause, TrappmError):
                raise error.cause from error
            if isinstance(error.cause, MemoryError) or TORCH_OUT_OF_MEMORY in str(error.cause):
                raise _DiedError("out of memory") from error
            raise CampaignError(f"the learner failed: {error.cause}") from error

    def _wait_for_start(self, on_progress: OnProgress | None) -> None:
        begin, is_told = time.monotonic(), False
        started = [self._actor.progress.remote()]
        while not ray.wait(started, timeout=POLL_S)[0]:
            if on_progress is not None:
                on_progress(0, 0)  # which raises if the campaign is to stop
            if not is_told and time.monotonic() - begin > START_S:
                is_told = True
                self._tell(
                    "the learner has not started yet: it waits for "
                    f"{self._memory_bytes / (1 << 30):.1f} GiB of its node's memory, which other "
                    "campaigns may have"
                )


class _DiedError(Exception):
    """The learner's process is gone, or of no use any more."""
