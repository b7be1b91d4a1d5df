"""How long steps take on a GPU: CUDA events around them, and one synchronisation at the end."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

from trappm.profiler.steps.meter import Mark, MarkedStep

if TYPE_CHECKING:
    import torch


def repeat(step: Callable[[], None], count: int, mark: Mark) -> None:
    """Runs so many steps, and sets the mark after each."""
    for _ in range(count):
        step()
        mark()


def between_events(work: MarkedStep, before: Callable[[], None]) -> list[float]:
    """Milliseconds on the GPU between the marks that the work sets, and from its start.

    `before` is launched first, so that the GPU has work when the first event is set: it would
    otherwise be set at once, and the first span hold the launch of what follows.
    """
    import torch

    events: list[torch.cuda.Event] = []

    def mark() -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        events.append(event)

    before()
    mark()
    work(mark)
    torch.cuda.synchronize()
    return [first.elapsed_time(second) for first, second in itertools.pairwise(events)]
