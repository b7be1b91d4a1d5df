"""Makes the static profiles of many architectures at once, in processes of this machine.

One profile is single-threaded work of seconds, mostly Python, so each worker process has one
thread. A worker that a model takes down costs that model only: who was at work when it died is
tried again, alone, and who dies alone is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trappm.cluster.profiles.worker_processes import (
    TooLongError,
    limited_cpu_time,
    submit,
    worker_pool,
)
from trappm.profiler.errors import TrappmError, one_line
from trappm.profiler.host.forks import forget_secrets
from trappm.profiler.records import Pair

if TYPE_CHECKING:
    from trappm.store import Store

ENDED_ITS_PROCESS = "the static profile ended its process"

_TASKS_PER_WORKER = 200
"""On average; then fresh workers go on, so that what libraries keep in memory cannot pile up."""


@dataclass(frozen=True)
class ProfiledGraph:
    """The static profile of an architecture at an input size, or why there is none."""

    architecture: str
    input_size: int
    template: bytes | None
    """As `GraphTemplate.to_bytes` gives it."""
    refusal: str | None
    step: bytes | None = None
    """As `StepProfile.to_bytes` gives it."""
    step_refusal: str | None = None
    """Why a model with a graph has no step profile."""

    def save(self, store: Store) -> None:
        store.workloads.save_graph(
            self.architecture,
            self.input_size,
            self.template,
            self.refusal,
            step=self.step,
            step_refusal=self.step_refusal,
        )


def profile_graph(
    architecture: str, input_size: int, step_refusal: str | None = None
) -> ProfiledGraph:
    """The static profile of an architecture at an input size, or why there is none.

    Whatever goes wrong costs no other architecture. If it does so for graph and step together, the
    graph is made alone. Call it from the main thread, which is where signals arrive.

    Args:
        architecture: a timm model name.
        input_size: in pixels.
        step_refusal: why there will be no step profile: it failed before. The graph is made alone.
    """
    from trappm.profiler.static_profile import graph_template, static_profile

    try:
        with limited_cpu_time():
            if step_refusal is not None:
                template = graph_template(architecture, input_size).to_bytes()
                return ProfiledGraph(architecture, input_size, template, None, None, step_refusal)
            made = static_profile(architecture, input_size)
            return ProfiledGraph(
                architecture,
                input_size,
                made.graph.to_bytes(),
                None,
                None if made.step is None else made.step.to_bytes(),
                made.step_refusal,
            )
    except TrappmError as error:
        reason = str(error)
    except TooLongError as error:
        reason = f"no static profile: {error}"
    except Exception as error:
        reason = f"the static profile failed: {type(error).__name__}: {one_line(error)}"
    if step_refusal is None:
        return profile_graph(architecture, input_size, reason)
    return ProfiledGraph(architecture, input_size, None, reason)


def profile_in_processes(pairs: Sequence[Pair], processes: int) -> Iterator[ProfiledGraph]:
    """Static profiles in the order of completion; a pair that ends its process is refused.

    The workers end with this process, whatever ends it, and at once with a Ctrl-C.
    """
    suspects: list[Pair] = []
    remaining = list(reversed(pairs))
    while remaining:
        batch = remaining[-processes * _TASKS_PER_WORKER :]
        del remaining[-len(batch) :]
        with worker_pool(min(processes, len(batch)), forget_secrets) as workers:
            yield from _profile_all(workers, batch, suspects, processes)
        remaining += batch  # what a dying worker has left over
    for pair in suspects:
        yield _profile_alone(pair)


def _profile_all(
    workers: ProcessPoolExecutor, batch: list[Pair], suspects: list[Pair], processes: int
) -> Iterator[ProfiledGraph]:
    """Takes from the batch until nothing is left; if a worker dies, names suspects and returns."""
    running: dict[Future[ProfiledGraph], Pair] = {}
    try:
        while batch or running:
            # No more than are at work, so that the suspects of a death are few.
            while batch and len(running) < processes:
                running[submit(workers, profile_graph, *batch[-1])] = batch[-1]
                batch.pop()
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                profiled = future.result()
                del running[future]
                yield profiled
    except BrokenProcessPool:
        suspects += running.values()


def _profile_alone(pair: Pair) -> ProfiledGraph:
    for step_refusal in (None, ENDED_ITS_PROCESS):
        with worker_pool(1, forget_secrets) as workers, contextlib.suppress(BrokenProcessPool):
            return submit(workers, profile_graph, *pair, step_refusal).result()
    return ProfiledGraph(*pair, None, ENDED_ITS_PROCESS)
