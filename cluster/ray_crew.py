"""The campaign's crew and learner, provided by Ray actors.

A worker that dies is news, not the end: Ray starts its actor again (`max_restarts=-1`), while the
measurement that was lost is not repeated by Ray (`max_task_retries=0`): the loop decides that.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import (
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from cluster.crew import (
    Choice,
    Finished,
    OnProgress,
    ProfiledGraph,
    Task,
    TrainingLabel,
    Worker,
)
from cluster.graphs import ENDED_ITS_PROCESS, profile_graph
from cluster.rehearsal import runs_nothing
from cluster.runtime import here, placement
from profiler.errors import CampaignError, TrappmError
from profiler.records import Configuration, is_cpu_device
from profiler.records import Protocol as MeasuringProtocol

POLL_S = 0.2


def profile_on_ray(pairs: Sequence[tuple[str, int]]) -> Iterator[ProfiledGraph]:
    """Static profiles, made by all nodes of the cluster, in the order of completion.

    Raises:
        CampaignError: the cluster does not make them, whatever the model.
    """
    task = ray.remote(num_cpus=1, max_retries=1)(profile_graph)
    waiting: dict[Any, tuple[tuple[str, int], str | None]] = {
        task.remote(*pair): (pair, None) for pair in pairs
    }
    while waiting:
        ready, _ = ray.wait(list(waiting), timeout=POLL_S)
        for reference in ready:
            pair, step_refusal = waiting.pop(reference)
            try:
                yield ray.get(reference)
            except (WorkerCrashedError, OutOfMemoryError):  # known, not fatal
                if step_refusal is None:
                    waiting[task.remote(*pair, ENDED_ITS_PROCESS)] = (pair, ENDED_ITS_PROCESS)
                else:
                    yield ProfiledGraph(*pair, None, ENDED_ITS_PROCESS)
            except RayError as error:
                raise CampaignError(
                    f"the cluster makes no static profiles ({_first_line(error)}); nothing made is "
                    "lost, and the same command goes on"
                ) from error


class RayCrew:
    """One profiler actor for each device, placed by node label."""

    def __init__(self, devices: Sequence[str]) -> None:
        from cluster.actors import ProfilerActor

        self._actors: dict[str, Any] = {}
        self._joining: dict[Any, str] = {}
        self._workers: dict[str, Worker] = {}
        self._running: dict[Any, tuple[Worker, Task]] = {}
        for device in devices:
            self._actors[device] = (
                ray.remote(ProfilerActor)
                .options(max_restarts=-1, max_task_retries=0, **placement(device))
                .remote(device)
            )
            self._ask_to_join(device)

    def _ask_to_join(self, device: str) -> None:
        self._joining[self._actors[device].describe.remote()] = device

    def profile(self, pairs: Sequence[tuple[str, int]]) -> Iterator[ProfiledGraph]:
        return profile_on_ray(pairs)

    def workers(self) -> Sequence[Worker]:
        if self._joining:
            # On a cluster that scales from zero the first node takes minutes to come.
            joined, _ = ray.wait(
                list(self._joining), num_returns=len(self._joining), timeout=POLL_S
            )
            for reference in joined:
                device = self._joining.pop(reference)
                try:
                    facts = _result(reference)
                except RayActorError:  # it died before it had joined, and is starting again
                    self._ask_to_join(device)
                    continue
                self._workers[device] = Worker(name=f"profiler-{device}", device=device, **facts)
        return list(self._workers.values())

    def awaited(self) -> Sequence[str]:
        return list(self._joining.values())

    def idle(self) -> Sequence[Worker]:
        busy = {worker.name for worker, _ in self._running.values()}
        busy_cores = {w.host for w, _ in self._running.values() if uses_cores(w.device)}
        return [
            worker
            for worker in self.workers()
            if worker.name not in busy
            and not (uses_cores(worker.device) and worker.host in busy_cores)
        ]

    def start(self, worker: Worker, task: Task, protocol: MeasuringProtocol) -> None:
        reference = self._actors[worker.device].measure.remote(
            task.configuration, protocol, task.attempt_key
        )
        self._running[reference] = (worker, task)

    def running(self) -> Sequence[tuple[Worker, Task]]:
        return list(self._running.values())

    def wait(self, timeout_s: float) -> Sequence[Finished]:
        if not self._running:
            time.sleep(min(timeout_s, POLL_S) if self._joining else 0)
            return []
        ready, _ = ray.wait(list(self._running), timeout=timeout_s)
        return [self._collect(reference) for reference in ready]

    def _collect(self, reference: Any) -> Finished:
        worker, task = self._running.pop(reference)
        try:
            return Finished(worker, task, ray.get(reference))
        except RayTaskError as error:
            return Finished(worker, task, None, f"the profiler failed: {error.cause}")
        except RayError as error:
            # Started again, it may be on another node: it joins anew, with its new facts.
            del self._workers[worker.device]
            self._ask_to_join(worker.device)
            return Finished(worker, task, None, f"the profiler died: {_first_line(error)}")


class LearnerProxy:
    """The learner actor behind the loop's `Learner` interface."""

    def __init__(self, **arguments: Any) -> None:
        from cluster.actors import LearnerActor

        options = {**here(), "max_concurrency": 2}
        self._actor = ray.remote(LearnerActor).options(**options).remote(**arguments)

    def set_pool(
        self,
        pool: Sequence[tuple[Configuration, bytes]],
        on_progress: OnProgress,
        steps: Mapping[tuple[str, int], bytes] | None = None,
    ) -> None:
        self._call("set_pool", pool, steps=steps, on_progress=on_progress)

    def fit(self, labels: Sequence[TrainingLabel], on_progress: OnProgress) -> dict[str, Any]:
        report: dict[str, Any] = self._call("fit", labels, on_progress=on_progress)
        return report

    def choose(
        self,
        device: str,
        count: int,
        *,
        candidates: Sequence[str],
        labelled: Sequence[str],
        seed: Sequence[int],
    ) -> Sequence[Choice]:
        choices: Sequence[Choice] = self._call(
            "choose", device, count, candidates=candidates, labelled=labelled, seed=seed
        )
        return choices

    def publish(self, registry: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
        info: dict[str, Any] = self._call("publish", registry, fields)
        return info

    def _call(
        self, method: str, *arguments: Any, on_progress: OnProgress | None = None, **keywords: Any
    ) -> Any:
        reference = self._actor.call.remote(method, arguments, keywords)
        try:
            while not ray.wait([reference], timeout=POLL_S)[0]:
                if on_progress is not None:
                    on_progress(*ray.get(self._actor.progress.remote()))
            return ray.get(reference)
        except RayTaskError as error:
            if isinstance(error.cause, TrappmError):
                raise error.cause from error
            raise CampaignError(f"the learner failed: {error.cause}") from error
        except RayActorError as error:
            raise CampaignError(
                f"the learner died ({_first_line(error)}); nothing recorded is lost"
            ) from error


def uses_cores(device: str) -> bool:
    """Whether its measurements keep the host's cores busy, and so disturb others of the kind."""
    return is_cpu_device(device) or runs_nothing(device)


def _result(reference: Any) -> Any:
    """The result of an actor's call; our own errors come out as they are."""
    try:
        return ray.get(reference)
    except RayTaskError as error:
        if isinstance(error.cause, TrappmError):
            raise error.cause from error
        raise


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
