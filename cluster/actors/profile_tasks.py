"""Static profiles and traced steps, made by Ray tasks.

On a cluster, nodes that do not measure make them, if there are any.

A worker that a model takes down costs that model only: it is tried once more with less, and refused
when it dies again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import ray
from ray.exceptions import OutOfMemoryError, RayError, WorkerCrashedError

from trappm.cluster.profiles import static_profiles, step_profiles
from trappm.cluster.profiles.static_profiles import ProfiledGraph, profile_graph
from trappm.cluster.profiles.step_profiles import StepKey, TracedStep, alike, trace_steps
from trappm.cluster.ray_runtime import first_line, off_measuring_nodes
from trappm.profiler.errors import CampaignError
from trappm.profiler.host.forks import forget_secrets
from trappm.profiler.records import Pair

Job = TypeVar("Job")
Made = TypeVar("Made")

POLL_S = 0.2


def profile_on_ray(pairs: Sequence[Pair], at_once: int | None = None) -> Iterator[ProfiledGraph]:
    """Yield static profiles in the order of completion.

    Args:
        pairs: Architectures with their input sizes.
        at_once: Number of tasks that run at once; None: as many as the cluster has cores for.

    Raises:
        CampaignError: the cluster does not make them, whatever the model.
    """

    def after_death(job: _GraphJob) -> tuple[list[_GraphJob], list[ProfiledGraph]]:
        architecture, input_size, step_refusal = job
        if step_refusal is None:
            return [(architecture, input_size, static_profiles.ENDED_ITS_PROCESS)], []
        return [], [
            ProfiledGraph(architecture, input_size, None, static_profiles.ENDED_ITS_PROCESS)
        ]

    jobs: list[_GraphJob] = [(*pair, None) for pair in pairs]
    yield from _each(_profile, jobs, after_death, at_once)


def trace_on_ray(keys: Sequence[StepKey], at_once: int | None = None) -> Iterator[TracedStep]:
    """Yield traced steps in the order of completion.

    Args:
        keys: The steps to trace.
        at_once: Number of tasks that run at once; None: as many as the cluster has cores for.

    Raises:
        CampaignError: the cluster does not make them, whatever the model.
    """

    def after_death(job: list[StepKey]) -> tuple[list[list[StepKey]], list[TracedStep]]:
        if len(job) > 1:
            return [[key] for key in job], []
        return [], [TracedStep(job[0], None, step_profiles.ENDED_ITS_PROCESS, is_final=False)]

    yield from _each(trace_steps, alike(keys), after_death, at_once)


_GraphJob = tuple[str, int, str | None]


def _profile(job: _GraphJob) -> list[ProfiledGraph]:
    return [profile_graph(*job)]


def _each(
    make: Callable[[Job], list[Made]],
    jobs: Sequence[Job],
    after_death: Callable[[Job], tuple[list[Job], list[Made]]],
    at_once: int | None,
) -> Iterator[Made]:
    """All that the jobs make; `after_death` replaces a job that ended its worker."""

    def make_without_secrets(job: Job) -> list[Made]:
        forget_secrets()  # Ray itself has read its token by now
        return make(job)

    options = {"num_cpus": 1, "max_retries": 1, **off_measuring_nodes()}
    task: Any = ray.remote(**options)(make_without_secrets)
    waiting, running = deque(jobs), dict[Any, Job]()
    while waiting or running:
        while waiting and (at_once is None or len(running) < at_once):
            job = waiting.popleft()
            running[task.remote(job)] = job
        ready, _ = ray.wait(list(running), timeout=POLL_S)
        for reference in ready:
            job = running.pop(reference)
            try:
                yield from ray.get(reference)
            except (WorkerCrashedError, OutOfMemoryError):  # known, not fatal
                more, given_up = after_death(job)
                waiting += more
                yield from given_up
            except RayError as error:
                raise CampaignError(
                    f"the cluster makes no profiles ({first_line(error)}); nothing made is lost, "
                    "and the same command goes on"
                ) from error
