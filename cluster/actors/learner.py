"""The Ray actor that learns for a campaign, and the campaign's handle to it.

Import this module inside `with ray_runtime(...)` only (see there).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import ray
import torch
from ray.exceptions import RayActorError, RayTaskError

from trappm.cluster.interfaces import Call, Choice, ChoiceRequest, PublishedSnapshot
from trappm.cluster.learning.campaign_learner import CampaignLearner
from trappm.cluster.profiles.step_profiles import StepKey
from trappm.cluster.ray_runtime import first_line, here, memory_here
from trappm.cluster.scheduler.training_report import TrainingReport
from trappm.learner.training_label import TrainingLabel
from trappm.profiler.errors import CampaignError, TrappmError
from trappm.profiler.kernels.kernel_measurement import KernelMeasurement
from trappm.profiler.records import Configuration

START_S = 60.0
"""Seconds after which a learner that has not started is waiting for memory."""

MAX_FAILURES = 3
"""Number of times that the learner's process may end in one call."""

BASE_BYTES, LABEL_BYTES = 1 << 30, 160 << 10
"""Memory that a learner requests, and the part for each label of the campaign. Measured peaks are
0.7 GiB with 600 labels, 1.4 GiB with 5,000 and 6.8 GiB with 50,000 (docs/studies/learner_speed.md).
"""

THREADS_THAT_SLEEP = {"OMP_WAIT_POLICY": "passive"}
"""OpenMP threads sleep while they wait for each other. Fits are thousands of small operations, and
threads that spin take ten times as long where others need the cores too."""

TORCH_OUT_OF_MEMORY = "can't allocate memory"

Result = TypeVar("Result")


class LearnerActor:
    """Encoder, heads and choices of one campaign in a process of its own."""

    def __init__(self, preset: str, strategy: str, source: str, seed: int, cache: Path) -> None:
        # Networks and encoders take all cores for each product; Ray gives its workers one. Heads
        # with physics are trained side by side instead (`trappm.learner.threads`).
        torch.set_num_threads(os.cpu_count() or 1)
        self._learner = CampaignLearner(
            preset=preset, strategy=strategy, source=source, seed=seed, cache=cache
        )
        self._progress = (0, 0)

    def progress(self) -> tuple[int, int]:
        """Return parts done and parts in all of the current call, from another thread."""
        return self._progress

    def set_pool(
        self,
        pool: Sequence[tuple[Configuration, bytes]],
        steps: Mapping[tuple[str, int], bytes],
        traced: Mapping[StepKey, bytes],
    ) -> None:
        self._learner.set_pool(pool, self._note, steps, traced)

    def fit(
        self,
        labels: Sequence[TrainingLabel],
        kernels: Mapping[str, Sequence[KernelMeasurement]],
    ) -> TrainingReport:
        return self._learner.fit(labels, self._note, kernels)

    def choose(self, request: ChoiceRequest) -> Sequence[Choice]:
        return self._learner.choose(request)

    def publish(self, registry: Path, fields: Mapping[str, Any]) -> PublishedSnapshot:
        return self._learner.publish(registry, fields)

    def promote(self, registry: Path, snapshot_id: str) -> str | None:
        return self._learner.promote(registry, snapshot_id)

    def _note(self, done: int, total: int) -> None:
        self._progress = (done, total)


class LearnerHandle:
    """The learner actor behind the campaign's `Learner` interface.

    When its process ends, another one is started, is given the pool and the labels of the last
    training (the encoder is on disk, the heads are trained again), and then repeats the call.

    Args:
        tell: Called with a line of news when the process ended.
        labels: Number of labels that the campaign is to have, which determines the memory that the
            actor requests. Learners that do not fit into their node's memory together start one
            after the other.
        learner: Class of the actor.
        arguments: Arguments of that class.
    """

    def __init__(
        self,
        *,
        tell: Callable[[str], None],
        labels: int,
        learner: type[Any] = LearnerActor,
        **arguments: Any,
    ) -> None:
        self.tell = tell
        self._class = ray.remote(concurrency_groups={"progress": 1})(learner)
        self._arguments = arguments
        self._memory_bytes = memory_here(BASE_BYTES + LABEL_BYTES * labels)
        self._state: dict[str, Callable[[Any], Any]] = {}
        """Calls that give a new process the state of the one before: set_pool, fit."""
        self._progress = (0, 0)
        self._actor: Any = None
        self._is_new = True
        """The process has not been given its state yet."""
        self._has_started = False
        self._started_at = 0.0
        self._look: Any = None
        """Reference of the progress that was asked for last."""
        self._start()

    def set_pool(
        self,
        pool: Sequence[tuple[Configuration, bytes]],
        steps: Mapping[tuple[str, int], bytes],
        traced: Mapping[StepKey, bytes],
    ) -> Call[None]:
        self._state = {}
        return self._call("set_pool", lambda actor: actor.set_pool.remote(pool, steps, traced))

    def fit(
        self,
        labels: Sequence[TrainingLabel],
        kernels: Mapping[str, Sequence[KernelMeasurement]],
    ) -> Call[TrainingReport]:
        return self._call("fit", lambda actor: actor.fit.remote(labels, kernels))

    def choose(self, request: ChoiceRequest) -> Call[Sequence[Choice]]:
        return self._call("choose", lambda actor: actor.choose.remote(request))

    def publish(self, registry: Path, fields: Mapping[str, Any]) -> Call[PublishedSnapshot]:
        return self._call("publish", lambda actor: actor.publish.remote(registry, fields))

    def promote(self, registry: Path, snapshot_id: str) -> Call[str | None]:
        return self._call("promote", lambda actor: actor.promote.remote(registry, snapshot_id))

    def submit(self, name: str, send: Callable[[Any], Any]) -> Any:
        """Return the reference of a call, after those that the process needs before it."""
        if self._is_new:
            self._is_new = False
            for state, send_state in self._state.items():
                if state != name:
                    send_state(self._actor)
        return send(self._actor)

    def restart(self) -> None:
        """Replace the process by a new one."""
        ray.kill(self._actor)  # in case it only ran out of memory
        self._start()

    def keep(self, name: str, send: Callable[[Any], Any]) -> None:
        """Remember a call that has succeeded, if later ones depend on it."""
        if name in {"set_pool", "fit"}:
            self._state[name] = send

    def look(self) -> tuple[int, int]:
        """Return the progress of the current call as known by now, without waiting for it."""
        if ray.wait([self._look], timeout=0)[0]:
            try:
                self._progress = ray.get(self._look)
            except RayActorError:  # which the call itself reports
                return self._progress
            self._has_started = True
            self._look = self._ask_progress()
        elif not self._has_started and time.monotonic() - self._started_at > START_S:
            self._has_started = True
            self.tell(
                "the learner has not started yet: it waits for "
                f"{self._memory_bytes / (1 << 30):.1f} GiB of its node's memory, which other "
                "campaigns may have"
            )
        return self._progress

    def _start(self) -> None:
        self._actor = self._class.options(
            **here(),
            memory=self._memory_bytes,
            runtime_env={"env_vars": THREADS_THAT_SLEEP},
        ).remote(**self._arguments)
        self._is_new = True
        self._has_started = False
        self._started_at = time.monotonic()
        self._look = self._ask_progress()

    def _ask_progress(self) -> Any:
        return self._actor.progress.options(concurrency_group="progress").remote()

    def _call(self, name: str, send: Callable[[Any], Any]) -> _LearnerCall[Any]:
        self._progress = (0, 0)
        return _LearnerCall(self, name, send)


class _LearnerCall(Generic[Result]):
    """A call of the learner actor, repeated if the actor's process ends."""

    def __init__(self, learner: LearnerHandle, name: str, send: Callable[[Any], Any]) -> None:
        self._learner = learner
        self._name = name
        self._send = send
        self._failures = 0
        self._reference = learner.submit(name, send)

    @property
    def progress(self) -> tuple[int, int]:
        return self._learner.look()

    def wait(self, timeout_s: float) -> bool:
        self._learner.look()
        if not ray.wait([self._reference], timeout=timeout_s)[0]:
            return False
        try:
            self._result: Result = ray.get(self._reference)
        except RayActorError as error:
            self._repeat(first_line(error), error)
            return False
        except RayTaskError as error:
            if isinstance(error.cause, TrappmError):
                raise error.cause from error
            if isinstance(error.cause, MemoryError) or TORCH_OUT_OF_MEMORY in str(error.cause):
                self._repeat("out of memory", error)
                return False
            raise CampaignError(f"the learner failed: {error.cause}") from error
        self._learner.keep(self._name, self._send)
        return True

    def result(self) -> Result:
        return self._result

    def _repeat(self, why: str, error: Exception) -> None:
        self._failures += 1
        if self._failures == MAX_FAILURES:
            raise CampaignError(
                f"the learner died {MAX_FAILURES} times, the last time in {self._name} ({why}); "
                "nothing recorded is lost. See that its node has memory to spare, then go "
                "on with: trappm campaign resume"
            ) from error
        self._learner.tell(f"the learner died in {self._name} ({why}); it is started again")
        self._learner.restart()
        self._reference = self._learner.submit(self._name, self._send)
