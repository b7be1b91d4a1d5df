"""Traced steps of whole pools, made by Ray tasks.

One trace is single-threaded work of about a second, mostly Python. On a cluster, nodes that do not
measure make them, if there are any. A model that ends its worker costs its own trace only.
"""

from __future__ import annotations

import contextlib
import platform
import signal
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

from trappm.cluster.ray_runtime import (
    can_run_elsewhere,
    first_line,
    last_line,
    nodes_at,
    tracing_options,
)
from trappm.profiler.errors import (
    CampaignError,
    InputError,
    UnsupportedModelError,
    is_of_this_machine,
    one_line,
)
from trappm.profiler.host.environment import Code, code_refusal, this_code
from trappm.profiler.host.forks import forget_secrets
from trappm.profiler.records import Configuration, size_text
from trappm.profiler.traced_step import (
    Refusal,
    Trace,
    TraceCache,
    TraceKey,
    entry_from_bytes,
    entry_to_bytes,
)

CPU_LIMIT_S = 600
"""CPU time after which a trace is abandoned, twenty times that of the slowest known model."""

POLL_S = 0.2

MAX_WORKER_LOSSES = 3
"""Number of workers that a trace may lose."""


class Traced(NamedTuple):
    """A step that was traced, or the reason why it was not."""

    key: TraceKey
    made: Trace | Refusal
    is_final: bool = True
    """True if tracing it again would end the same way."""

    def __str__(self) -> str:
        key, usual = self.key, TraceKey(self.key.model, self.key.input_size)
        own, others = ((*step.settings, step.phase) for step in (key, usual))
        options = [str(x) for x, other in zip(own, others, strict=True) if x != other]
        return ", ".join([f"{key.model} at {size_text(key.model, key.input_size or 0)}", *options])

    @property
    def has_graph(self) -> bool:
        return isinstance(self.made, Trace) and self.made.graph is not None

    @property
    def refusal(self) -> str | None:
        """Reason why the step, or a part of it, is missing."""
        return self.made.refusal if isinstance(self.made, Trace) else self.made.reason

    @property
    def remark(self) -> str | None:
        """Sentence about what is missing of the step, for people."""
        part = "step" if self.has_graph else "graph"
        return f"no {part} of {self}: {self.refusal}" if self.refusal else None

    def keep(self, cache: TraceCache) -> None:
        """Put it into a cache if it is final."""
        if self.is_final:
            cache.put(self.key, self.made)


def steps_of(configurations: Iterable[Configuration]) -> list[TraceKey]:
    """Return the distinct steps of configurations, sorted."""
    return sorted(set(map(TraceKey.of, configurations)))


def trace_of(key: TraceKey) -> Traced:
    """Trace a step in the main thread of a process, or return the reason of any failure.

    A reason is final if it lies in the model. Lack of memory, a full disk or a missing library
    pass.
    """
    from trappm.profiler.trace import trace

    try:
        with limit_cpu_time():
            assert key.input_size is not None  # noqa: S101  (of names)
            return Traced(key, trace(key.model, key.input_size, key.settings, key.phase))
    except TooLongError as error:
        return Traced(key, Refusal(str(error)))
    except (UnsupportedModelError, InputError) as error:
        return Traced(key, Refusal(str(error)), is_final=not is_of_this_machine(error))
    except Exception as error:  # a model's own code may raise anything
        return Traced(key, Refusal(one_line(error)), is_final=False)


class TooLongError(BaseException):
    """A trace took too much CPU time; passes through every `except Exception` of libraries."""


@contextlib.contextmanager
def limit_cpu_time() -> Iterator[None]:
    """Raise TooLongError in the block after `CPU_LIMIT_S` of CPU time."""

    def abandon(_signal: int, _frame: FrameType | None) -> None:
        raise TooLongError(f"it took more than {CPU_LIMIT_S} s of CPU time")

    before = signal.signal(signal.SIGPROF, abandon)
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class TraceTasks:
    """Traces of steps as Ray tasks, each in a task of its own; inside `ray_runtime`.

    A task whose node or worker was lost is repeated, up to `MAX_WORKER_LOSSES` times. After that
    its model may be the cause, and only the next campaign traces it again. Nodes with other code
    than this process, and those where the task itself fails, trace nothing more.

    Args:
        keys: Steps to trace.
        at_once: Number of tasks that run at once; None: as many as the cluster has cores for.
        off_devices: Keys of devices whose nodes trace only if no others can.
    """

    def __init__(
        self,
        keys: Iterable[TraceKey],
        *,
        at_once: int | None = None,
        off_devices: Sequence[str] = (),
    ) -> None:
        self._off_devices = off_devices
        self._refused = set[str]()
        """Ids of nodes that cannot trace."""
        self._task = self._make_task()
        self._waiting, self._at_once = deque(keys), at_once
        self._running = dict[Any, TraceKey]()
        self._losses = Counter[TraceKey]()
        self._begin()

    def take(self, timeout_s: float) -> list[Traced]:
        """Return the steps that have been traced, after waiting this long for the first."""
        import ray

        if not self._running:
            return []
        ray.wait(list(self._running), timeout=timeout_s)
        ready, _ = ray.wait(list(self._running), num_returns=len(self._running), timeout=0)
        made = [self._collect(reference) for reference in ready]
        self._begin()
        return [traced for traced in made if traced is not None]

    def cancel(self) -> None:
        """Cancel what has not been traced."""
        import ray

        for reference in self._running:
            ray.cancel(reference, force=True)
        self._running.clear()
        self._waiting.clear()

    def __iter__(self) -> Iterator[Traced]:
        """Yield the traced steps in the order of completion."""
        while self._running:
            yield from self.take(POLL_S)

    def _make_task(self) -> Any:
        import ray

        place = tracing_options(self._off_devices, self._refused)
        return ray.remote(num_cpus=1, max_retries=0, **place)(_with_same_code)

    def _begin(self) -> None:
        while self._waiting and (self._at_once is None or len(self._running) < self._at_once):
            key = self._waiting.popleft()
            self._running[self._task.remote(this_code(), _trace_to_bytes, key)] = key

    def _collect(self, reference: Any) -> Traced | None:
        """Return a traced step; None if it is repeated, as its node was lost or cannot trace.

        Raises:
            CampaignError: Tasks fail on all nodes, or all have other code.
        """
        import ray
        from ray.exceptions import RayError, RayTaskError

        key = self._running.pop(reference)
        try:
            made = ray.get(reference)
        except RayError as error:
            if isinstance(error, RayTaskError):  # TraPPM is missing there, or too old
                self._refuse(nodes_at(error.ip), last_line(error))
            self._losses[key] += 1
            if self._losses[key] < MAX_WORKER_LOSSES:
                self._waiting.append(key)
                return None
            why = f"tracing it ended {MAX_WORKER_LOSSES} processes ({first_line(error)})"
            return Traced(key, Refusal(why), is_final=False)
        if isinstance(made, _RefusedNode):
            self._refuse({made.id}, made.why)
            self._waiting.append(key)
            return None
        data, is_final = made
        return Traced(key, entry_from_bytes(data), is_final)

    def _refuse(self, node_ids: Collection[str], why: str) -> None:
        """Trace on other nodes from now on.

        Raises:
            CampaignError: There is no other node.
        """
        self._refused.update(node_ids)
        if not can_run_elsewhere(self._refused):
            raise CampaignError(f"no node can trace: {why}")
        self._task = self._make_task()


class _RefusedNode(NamedTuple):
    """A node that has other code than the campaign."""

    id: str
    why: str


def _with_same_code(
    code: Code, task: Callable[[TraceKey], tuple[bytes, bool]], key: TraceKey
) -> tuple[bytes, bool] | _RefusedNode:
    """Run a task if this node has the campaign's code."""
    if (why := code_refusal(platform.node(), this_code(), code)) is not None:
        import ray

        return _RefusedNode(ray.get_runtime_context().get_node_id(), why)
    return task(key)


def _trace_to_bytes(key: TraceKey) -> tuple[bytes, bool]:
    forget_secrets()  # Ray itself has read its token by now
    traced = trace_of(key)
    return entry_to_bytes(traced.made), traced.is_final
