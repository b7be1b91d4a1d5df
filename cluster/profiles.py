"""Traced steps of whole pools, made by Ray tasks.

One trace is single-threaded work of about a second, mostly Python. On a cluster, nodes that do not
measure make them, if there are any. A model that ends its worker costs its own trace only.
"""

from __future__ import annotations

import contextlib
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple

from trappm.cluster.ray_runtime import first_line, off_measuring_nodes
from trappm.profiler.errors import (
    CampaignError,
    InputError,
    UnsupportedModelError,
    is_of_this_machine,
    one_line,
)
from trappm.profiler.host.forks import forget_secrets
from trappm.profiler.records import Configuration, size_text
from trappm.profiler.records.trace import Trace
from trappm.profiler.trace_cache import (
    Refusal,
    TraceCache,
    TraceKey,
    entry_from_bytes,
    entry_to_bytes,
)

CPU_LIMIT_S = 600
"""CPU time after which a trace is abandoned, twenty times that of the slowest known model."""

POLL_S = 0.2


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
        with limited_cpu_time():
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
def limited_cpu_time() -> Iterator[None]:
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


def trace_on_ray(keys: Iterable[TraceKey], at_once: int | None = None) -> Iterator[Traced]:
    """Yield traced steps in the order of completion; inside `ray_runtime`.

    Args:
        keys: Steps to trace, each in a task of its own.
        at_once: Number of tasks that run at once; None: as many as the cluster has cores for.

    Raises:
        CampaignError: The cluster does not make them, whatever the model.
    """
    import ray
    from ray.exceptions import OutOfMemoryError, RayError, WorkerCrashedError

    options = {"num_cpus": 1, "max_retries": 1, **off_measuring_nodes()}
    task: Any = ray.remote(**options)(_trace_to_bytes)
    waiting, running = deque(keys), dict[Any, TraceKey]()
    while waiting or running:
        while waiting and (at_once is None or len(running) < at_once):
            key = waiting.popleft()
            running[task.remote(key)] = key
        ready, _ = ray.wait(list(running), timeout=POLL_S)
        for reference in ready:
            key = running.pop(reference)
            try:
                data, is_final = ray.get(reference)
            except (WorkerCrashedError, OutOfMemoryError):
                yield Traced(key, Refusal("tracing it ended the process"), is_final=False)
            except RayError as error:
                raise CampaignError(
                    f"the cluster traces no steps ({first_line(error)}); nothing made is lost, "
                    "and the same command continues"
                ) from error
            else:
                yield Traced(key, entry_from_bytes(data), is_final)


def _trace_to_bytes(key: TraceKey) -> tuple[bytes, bool]:
    forget_secrets()  # Ray itself has read its token by now
    traced = trace_of(key)
    return entry_to_bytes(traced.made), traced.is_final
