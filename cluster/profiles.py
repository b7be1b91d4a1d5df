"""Static profiles and traced steps of whole pools, made by Ray tasks and cached.

One profile is single-threaded work of seconds, mostly Python. On a cluster, nodes that do not
measure make them, if there are any. A model that ends its worker costs that model only: it is tried
once more with less, and refused if it ends its worker again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from trappm.cluster.ray_runtime import first_line, off_measuring_nodes
from trappm.profiler.errors import CampaignError, TrappmError, one_line
from trappm.profiler.host.forks import forget_secrets
from trappm.profiler.records import Configuration, Execution, MemoryFormat, Pair, Precision

if TYPE_CHECKING:
    from trappm.store import Store

FORMAT = 5
"""Version of cached steps; increase it when the recorder changes what it writes."""

CPU_LIMIT_S = 600
"""CPU time after which a profile is abandoned, twenty times that of the slowest known model."""

POLL_S = 0.2

_PROFILE_ENDED = "the static profile ended its process"
_TRACE_ENDED = "tracing its steps ended the process"

Job = TypeVar("Job")
Made = TypeVar("Made")


@dataclass(frozen=True)
class ProfiledGraph:
    """Static profile of an architecture at an input size, or the reason why there is none."""

    architecture: str
    input_size: int
    template: bytes | None
    """Graph, as `GraphTemplate.to_bytes` returns it."""
    refusal: str | None
    step: bytes | None = None
    """Step profile, as `StepProfile.to_bytes` returns it."""
    step_refusal: str | None = None
    """Reason why a model with a graph has no step profile."""

    def save(self, store: Store) -> None:
        store.workloads.save_graph(
            self.architecture,
            self.input_size,
            self.template,
            self.refusal,
            step=self.step,
            step_refusal=self.step_refusal,
        )


@dataclass(frozen=True, order=True)
class StepKey:
    """Everything that a traced step depends on."""

    architecture: str
    input_size: int
    precision: Precision
    memory_format: MemoryFormat
    fused_attention: bool
    execution: Execution = Execution.EAGER

    @classmethod
    def of(cls, configuration: Configuration, *, fused_attention: bool = True) -> Self:
        """Return the key of a configuration; PyTorch fuses attention from version 2 on."""
        c = configuration
        return cls(
            c.architecture, c.input_size, c.precision, c.memory_format, fused_attention, c.execution
        )

    @property
    def is_plain(self) -> bool:
        """Return whether the store has this step with the graph."""
        settings = self.precision, self.memory_format, self.fused_attention, self.execution
        return settings == (Precision.FP32, MemoryFormat.CONTIGUOUS, True, Execution.EAGER)

    @property
    def file_name(self) -> str:
        """Hash of the key and of the versions of timm and PyTorch."""
        parts = (FORMAT, *_versions(), self.architecture, self.input_size, str(self.precision),
                str(self.memory_format), self.fused_attention, str(self.execution))  # fmt: skip
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class TracedStep:
    """Traced steps of one key, or the reason why there are none."""

    key: StepKey
    profile: bytes | None
    """Steps, as `StepProfile.to_bytes` returns them."""
    refusal: str
    is_final: bool = True
    """True if tracing it again would end the same way; False if its process was killed."""


@dataclass(frozen=True)
class StepCache:
    """Traced steps and reasons of refusals in a folder, which may be deleted at any time."""

    folder: Path

    def get(self, key: StepKey) -> bytes | None:
        """Return a profile as `StepProfile.to_bytes` does; a damaged one is removed."""
        from trappm.profiler.records.trace import StepProfile

        path = self._path(key, "npz")
        try:
            content = path.read_bytes()
            StepProfile.from_bytes(content)
        except OSError:
            return None
        except TrappmError:
            path.unlink(missing_ok=True)
            return None
        return content

    def missing(self, keys: Iterable[StepKey]) -> list[StepKey]:
        """Return keys that are neither traced nor refused."""
        there = {path.stem for path in self.folder.glob("*.*")}
        return [key for key in keys if key.file_name not in there]

    def put(self, traced: TracedStep) -> None:
        """Keep a profile or a refusal; other processes may do so at the same time."""
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.folder / f".{traced.key.file_name}.{os.getpid()}.part"
        part.write_bytes(traced.profile or traced.refusal.encode())
        part.replace(self._path(traced.key, "npz" if traced.profile else "txt"))

    def _path(self, key: StepKey, suffix: str) -> Path:
        return self.folder / f"{key.file_name}.{suffix}"


@cache
def _versions() -> tuple[str, str]:
    return version("timm"), version("torch")


# One profile, in the main thread of a process, where signals arrive.


def profile_graph(
    architecture: str, input_size: int, step_refusal: str | None = None
) -> ProfiledGraph:
    """Make a static profile; whatever goes wrong, the reason is returned.

    If graph and step fail together, or `step_refusal` says why the step failed before, the graph
    is made alone.
    """
    from trappm.profiler.static_profile import graph_template, static_profile

    try:
        with limited_cpu_time():
            if step_refusal is not None:
                template = graph_template(architecture, input_size).to_bytes()
                return ProfiledGraph(architecture, input_size, template, None, None, step_refusal)
            made = static_profile(architecture, input_size)
            step = None if made.step is None else made.step.to_bytes()
            return ProfiledGraph(
                architecture, input_size, made.graph.to_bytes(), None, step, made.step_refusal
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


def trace_steps(keys: Sequence[StepKey]) -> list[TracedStep]:
    """Trace the steps of a few keys; a failure costs its key only."""
    from trappm.profiler.static_profile import step_profile
    from trappm.profiler.tracing.tracer import StepOptions

    def traced(key: StepKey) -> TracedStep:
        options = StepOptions(
            precision=key.precision,
            memory_format=key.memory_format,
            fused_attention=key.fused_attention,
            is_compiled=key.execution is Execution.COMPILE,
        )
        try:
            with limited_cpu_time():
                profile = step_profile(key.architecture, key.input_size, options)
            return TracedStep(key, profile.to_bytes(), "")
        except TooLongError as error:
            return TracedStep(key, None, str(error))
        except Exception as error:  # a model's own code may raise anything
            return TracedStep(key, None, one_line(error))

    return [traced(key) for key in keys]


class TooLongError(BaseException):
    """A profile took too much CPU time; passes through every `except Exception` of libraries."""


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


# Many of them, inside `ray_runtime`.

_GraphJob = tuple[str, int, str | None]


def profile_on_ray(pairs: Sequence[Pair], at_once: int | None = None) -> Iterator[ProfiledGraph]:
    """Yield static profiles in the order of completion; arguments as of `trace_on_ray`."""

    def after_crash(job: _GraphJob) -> tuple[list[_GraphJob], list[ProfiledGraph]]:
        architecture, input_size, step_refusal = job
        if step_refusal is None:
            return [(architecture, input_size, _PROFILE_ENDED)], []
        return [], [ProfiledGraph(architecture, input_size, None, _PROFILE_ENDED)]

    jobs: list[_GraphJob] = [(*pair, None) for pair in pairs]
    yield from _each(_profile, jobs, after_crash, at_once)


def _profile(job: _GraphJob) -> list[ProfiledGraph]:
    return [profile_graph(*job)]


def trace_on_ray(keys: Iterable[StepKey], at_once: int | None = None) -> Iterator[TracedStep]:
    """Yield traced steps in the order of completion.

    Args:
        keys: Steps to trace; those of one architecture and input size are traced together.
        at_once: Number of tasks that run at once; None: as many as the cluster has cores for.

    Raises:
        CampaignError: The cluster does not make them, whatever the model.
    """

    def after_crash(job: list[StepKey]) -> tuple[list[list[StepKey]], list[TracedStep]]:
        if len(job) > 1:
            return [[key] for key in job], []
        return [], [TracedStep(job[0], None, _TRACE_ENDED, is_final=False)]

    by_graph = groupby(sorted(keys), lambda key: (key.architecture, key.input_size))
    yield from _each(trace_steps, [list(part) for _, part in by_graph], after_crash, at_once)


def _each(
    make: Callable[[Job], list[Made]],
    jobs: Sequence[Job],
    after_crash: Callable[[Job], tuple[list[Job], list[Made]]],
    at_once: int | None = None,
) -> Iterator[Made]:
    """Yield all that the jobs make, each in a task of its own.

    `after_crash` returns the jobs and results that replace a job which ended its worker.
    """
    import ray
    from ray.exceptions import OutOfMemoryError, RayError, WorkerCrashedError

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
            except (WorkerCrashedError, OutOfMemoryError):
                more, refused = after_crash(job)
                waiting += more
                yield from refused
            except RayError as error:
                raise CampaignError(
                    f"the cluster makes no profiles ({first_line(error)}); nothing made is lost, "
                    "and the same command continues"
                ) from error
