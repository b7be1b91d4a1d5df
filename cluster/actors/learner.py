"""The campaign's handle to its learner, which is a Ray actor.

Import this module inside `with ray_runtime(...)` only (see there).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError

from trappm.cluster.learning.campaign_learner import CampaignLearner
from trappm.cluster.profiles import StepKey
from trappm.cluster.ray_runtime import first_line, here, memory_here
from trappm.cluster.scheduler.training_report import TrainingReport
from trappm.cluster.tasks import Choice, ChoiceRequest, PublishedSnapshot
from trappm.learner.workload import TrainingLabel
from trappm.profiler.errors import CampaignError, TrappmError
from trappm.profiler.kernels.kernel_call import KernelMeasurement
from trappm.profiler.records import Configuration, Pair

START_S = 60.0
"""Seconds after which a learner that has not started is waiting for memory."""

MAX_FAILURES = 3
"""Number of times that the learner's process may end in one call."""

BASE_BYTES, LABEL_BYTES = 1 << 30, 160 << 10
"""Memory that a learner requests, and the part for each label of the campaign. Measured peaks are
0.7 GiB with 600 labels, 1.4 GiB with 5,000 and 6.8 GiB with 50,000
(docs/research/learner_speed.md)."""

THREADS = {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": str(os.cpu_count() or 1)}
"""Networks and encoders use all cores for each product; Ray gives its workers one. OpenMP threads
sleep while they wait for each other: fits are thousands of small operations, and threads that spin
take ten times as long where others need the cores too."""

TORCH_OUT_OF_MEMORY = "can't allocate memory"

Result = TypeVar("Result")


class LearnerHandle:
    """A learner actor, which does one call after the other. Each method returns at once.

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
        learner: type[Any] = CampaignLearner,
        **arguments: Any,
    ) -> None:
        self.tell = tell
        self._class = ray.remote(concurrency_groups={"progress": 1})(learner)
        self._arguments = arguments
        self._memory_bytes = memory_here(BASE_BYTES + LABEL_BYTES * labels)
        self._state: dict[str, Callable[[Any], Any]] = {}
        """Calls that give a new process the state of the one before: set_pool, fit."""
        self._progress = (0, 0)
        self._is_new = True
        """True if the process has not been given its state yet."""
        self._has_started = False
        self._started_at = 0.0
        self._start()

    def set_pool(
        self,
        pool: Sequence[tuple[Configuration, bytes]],
        steps: Mapping[Pair, bytes],
        traced: Mapping[StepKey, bytes],
    ) -> LearnerCall[None]:
        self._state = {}
        return LearnerCall(
            self, "set_pool", lambda actor: actor.set_pool.remote(pool, steps, traced)
        )

    def fit(
        self,
        labels: Sequence[TrainingLabel],
        kernels: Mapping[str, Sequence[KernelMeasurement]],
    ) -> LearnerCall[TrainingReport]:
        return LearnerCall(self, "fit", lambda actor: actor.fit.remote(labels, kernels))

    def choose(self, request: ChoiceRequest) -> LearnerCall[Sequence[Choice]]:
        return LearnerCall(self, "choose", lambda actor: actor.choose.remote(request))

    def publish(self, registry: Path, fields: Mapping[str, Any]) -> LearnerCall[PublishedSnapshot]:
        return LearnerCall(self, "publish", lambda actor: actor.publish.remote(registry, fields))

    def promote(self, registry: Path, snapshot_id: str) -> LearnerCall[str | None]:
        return LearnerCall(
            self, "promote", lambda actor: actor.promote.remote(registry, snapshot_id)
        )

    def submit(self, name: str, send: Callable[[Any], Any]) -> Any:
        """Return the reference of a call, after those that a new process needs before it."""
        self._progress = (0, 0)
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

    def progress(self) -> tuple[int, int]:
        """Return the progress of the current call as known by now, without waiting for it."""
        if ray.wait([self._asked], timeout=0)[0]:
            try:
                self._progress = ray.get(self._asked)
            except RayActorError:  # which the call itself reports
                return self._progress
            self._has_started = True
            self._ask_progress()
        elif not self._has_started and time.monotonic() - self._started_at > START_S:
            self._has_started = True
            self.tell(
                "the learner has not started yet: it waits for "
                f"{self._memory_bytes / (1 << 30):.1f} GiB of its node's memory, which other "
                "campaigns may have"
            )
        return self._progress

    def _start(self) -> None:
        options = {**here(), "memory": self._memory_bytes, "runtime_env": {"env_vars": THREADS}}
        self._actor = self._class.options(**options).remote(**self._arguments)
        self._is_new = True
        self._has_started = False
        self._started_at = time.monotonic()
        self._ask_progress()

    def _ask_progress(self) -> None:
        self._asked = self._actor.progress.options(concurrency_group="progress").remote()


class LearnerCall(Generic[Result]):
    """A call of the learner actor, repeated if the actor's process ends."""

    def __init__(self, learner: LearnerHandle, name: str, send: Callable[[Any], Any]) -> None:
        self._learner = learner
        self._name = name
        self._send = send
        self._failures = 0
        self._reference = learner.submit(name, send)

    @property
    def progress(self) -> tuple[int, int]:
        """Parts done, and parts in all; (0, 0) while unknown."""
        return self._learner.progress()

    def wait(self, timeout_s: float) -> bool:
        """Return whether the call has ended, after waiting for it this long at most.

        Raises:
            TrappmError: The learner failed.
        """
        self._learner.progress()
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
        """Return the result of a call that has ended."""
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
