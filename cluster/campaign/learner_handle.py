"""The campaign's handle to its learner, which is a Ray actor.

Import this module inside `with ray_runtime(...)` only (see there).
"""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Callable
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError, RayError, RayTaskError, RuntimeEnvSetupError
from threadpoolctl import threadpool_limits

from trappm.cluster.campaign.learner import CampaignLearner
from trappm.cluster.ray_runtime import first_line, last_line, learner_options
from trappm.profiler.errors import CampaignError, TrappmError
from trappm.profiler.host import procfs
from trappm.profiler.host.environment import Code, code_refusal, this_code

START_S = 60.0
"""Seconds after which a learner that has not started is waiting for memory."""

MAX_FAILURES = 3
"""Number of times that the learner's process may end in one call."""

BASE_BYTES, LABEL_BYTES = 1 << 30, 160 << 10
"""Memory that a learner requests, and the part for each label of the campaign. Measured peaks are
0.7 GiB with 600 labels, 1.4 GiB with 5,000 and 6.8 GiB with 50,000
(docs/research/design_notes.md)."""

PASSIVE = {"OMP_WAIT_POLICY": "passive"}
"""OpenMP threads sleep while they wait for each other: fits are thousands of small operations, and
threads that spin take ten times as long where others need the cores too."""

LIMIT_SHARE = 0.8
"""Share of the memory of its node or container that a learner may take.

Beyond it allocations fail and it is started again; the kernel would end the whole container."""

TORCH_OUT_OF_MEMORY = "can't allocate memory"

STATEFUL = (CampaignLearner.set_pool.__name__, CampaignLearner.fit.__name__)
"""Methods of the learner that later calls depend on."""


class LearnerHandle:
    """A learner actor, which does one call after the other.

    When its process ends, another one is started, is given the pool and the labels of the last
    training (the encoder is on disk, the heads are trained again), and then repeats the call.

    Args:
        tell: Called with a line of news when the process ended.
        labels: Number of labels that the campaign is to have, which determines the memory that the
            actor requests. Learners that do not fit into their node's memory together start one
            after the other.
        device: GPU that it reserves on any node, which it computes on the cores of; None: the
            caller's node, without one.
        learner: Class of the actor.
        arguments: Arguments of that class.
    """

    def __init__(
        self,
        *,
        tell: Callable[[str], None],
        labels: int,
        device: str | None = None,
        learner: type[Any] = CampaignLearner,
        **arguments: Any,
    ) -> None:
        self.tell = tell
        self.result: Any = None
        """Result of the last call that has ended."""
        self._class = ray.remote(concurrency_groups={"progress": 1})(prepare_learner(learner))
        self._arguments = arguments
        self._device = device
        self._memory_bytes = BASE_BYTES + LABEL_BYTES * labels
        self._is_new: bool
        """True if the process has not been given its state yet."""
        self._has_started: bool
        self._started_at: float
        self._progress: tuple[int, int] = (0, 0)
        self._state: dict[str, tuple[Any, ...]] = {}
        """Arguments of the last calls that later calls depend on, by method."""
        self._start()

    def begin(self, method: str, *arguments: Any) -> None:
        """Begin a call of a method of the learner; the one before must have ended."""
        self._call = method, arguments
        self._failures = 0
        self._submit()

    def wait(self, timeout_s: float) -> bool:
        """Return whether the call has ended, after waiting for it this long at most.

        Raises:
            TrappmError: The learner failed.
        """
        self.progress()
        if not ray.wait(self._references[-1:], timeout=timeout_s)[0]:
            return False
        try:
            for reference in self._references:  # an earlier call's error is the cause of others
                self.result = ray.get(reference)
        except RayTaskError as error:
            if isinstance(error.cause, TrappmError):
                raise error.cause from error
            if isinstance(error.cause, MemoryError) or TORCH_OUT_OF_MEMORY in str(error.cause):
                self._repeat("out of memory", error)
                return False
            raise CampaignError(f"the learner failed: {error.cause}") from error
        except RayError as error:  # its process or node is gone, or could not be prepared
            is_new = isinstance(error, RuntimeEnvSetupError) or (
                isinstance(error, RayActorError) and error.actor_init_failed
            )
            self._repeat(last_line(error) if is_new else first_line(error), error)
            return False
        method, arguments = self._call
        if method in STATEFUL:
            self._state[method] = arguments
        return True

    def close(self) -> None:
        """End the learner."""
        ray.kill(self._actor)

    def progress(self) -> tuple[int, int]:
        """Return parts done and parts in all of the current call; (0, 0) while unknown."""
        if ray.wait([self._progress_call], timeout=0)[0]:
            try:
                self._progress = ray.get(self._progress_call)
            except RayError:  # the call itself reports it
                return self._progress
            self._has_started = True
            self._ask_progress()
        elif not self._has_started and time.monotonic() - self._started_at > START_S:
            self._has_started = True
            gpu = "" if self._device is None else f"a GPU ({self._device}) and "
            self.tell(
                f"the learner has not started yet: it waits for {gpu}"
                f"{self._options['memory'] / (1 << 30):.1f} GiB of its node's memory, which other "
                "campaigns may have"
            )
        return self._progress

    def _start(self) -> None:
        self._options = learner_options(self._device, self._memory_bytes)
        actor = self._class.options(**self._options, runtime_env={"env_vars": PASSIVE})
        self._actor = actor.remote(this_code(), **self._arguments)
        self._is_new = True
        self._has_started = False
        self._started_at = time.monotonic()
        self._ask_progress()

    def _submit(self) -> None:
        """Send the call, after those that a new process needs before it."""
        method, _ = self._call
        self._progress = (0, 0)
        earlier = self._state.items() if self._is_new else ()
        calls = [(name, given) for name, given in earlier if name != method]
        self._is_new = False
        self._references = [
            getattr(self._actor, name).remote(*given) for name, given in (*calls, self._call)
        ]

    def _repeat(self, why: str, error: Exception) -> None:
        """Repeat the call on a new process."""
        method, _ = self._call
        self._failures += 1
        if self._failures == MAX_FAILURES:
            raise CampaignError(
                f"the learner crashed {MAX_FAILURES} times, the last time in {method} ({why}); "
                "nothing recorded is lost. See that its node has memory to spare, then go "
                "on with: trappm campaign resume"
            ) from error
        self.tell(f"the learner crashed in {method} ({why}); it is restarted")
        ray.kill(self._actor)  # in case it only ran out of memory
        self._start()
        self._submit()

    def _ask_progress(self) -> None:
        self._progress_call = self._actor.progress.options(concurrency_group="progress").remote()


def prepare_learner(learner: type[Any]) -> type[Any]:
    """Return a class whose instances prepare their process on its node.

    They take the campaign's code first, and refuse to work on a node with other code. They limit
    the memory of the process to `LIMIT_SHARE`, and use all cores for each product of matrices; Ray
    gives its workers one.
    """

    def begin(self: Any, code: Code, **arguments: Any) -> None:
        if refusal := code_refusal(platform.node(), this_code(), code):
            raise CampaignError(refusal)
        limit = int(LIMIT_SHARE * procfs.allowed_memory_mib() * 2**20)
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(cores)
        threadpool_limits(cores)
        learner.__init__(self, **arguments)

    return type(learner.__name__, (learner,), {"__init__": begin, "__module__": learner.__module__})
