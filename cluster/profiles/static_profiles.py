"""The static profile of an architecture: graph and step profile, or why there is none.

One profile is single-threaded work of seconds, mostly Python; `actors.profile_tasks` makes many.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from trappm.profiler.errors import TrappmError, one_line

if TYPE_CHECKING:
    from trappm.store import Store

ENDED_ITS_PROCESS = "the static profile ended its process"

CPU_LIMIT_S = 600
"""CPU time after which a profile is abandoned; the slowest that we know takes a twentieth of it."""


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


class TooLongError(BaseException):
    """A profile took too much CPU time; passes through every `except Exception` of libraries."""


@contextlib.contextmanager
def limited_cpu_time() -> Iterator[None]:
    """Raises TooLongError in the block after `CPU_LIMIT_S`; for the main thread of a process."""
    before = signal.signal(signal.SIGPROF, _give_up)
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _give_up(_signal: int, _frame: FrameType | None) -> None:
    raise TooLongError(f"it took more than {CPU_LIMIT_S} s of CPU time")
