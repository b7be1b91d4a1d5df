"""Limit of the time in which a model's steps run on values, on the CPU.

Such steps compute all that a GPU would, so they may take minutes; other traces compute nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar

from trappm.profiler.errors import TraceTimeoutError

SLOW_S = 2.0
"""Seconds after which a run shows its progress."""


class TimeLimit:
    """Limit of all runs of one model together.

    Args:
        model: Name of the model in messages.
        limit_s: Seconds after which a run is ended.
        show: Called when a run has become slow; shows progress until the block ends.
    """

    def __init__(
        self,
        model: str,
        limit_s: float,
        show: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._model, self._limit_s, self._show = model, limit_s, show
        self._spent_s = 0.0
        self._began_s: float | None = None
        self._progress: ExitStack | None = None

    @contextmanager
    def apply(self) -> Iterator[None]:
        """Apply the limit to steps that this thread runs on values within the block."""
        token = _LIMIT.set(self)
        try:
            yield
        finally:
            _LIMIT.reset(token)
            if self._began_s is not None:
                self._spent_s += time.monotonic() - self._began_s
                self._began_s = None
            if self._progress is not None:
                self._progress.close()
                self._progress = None

    def check(self) -> None:
        """Note that an operator runs on values; raises TraceTimeoutError beyond the limit."""
        now_s = time.monotonic()
        if self._began_s is None:
            self._began_s = now_s
        seconds = self._spent_s + now_s - self._began_s
        if seconds > self._limit_s:
            raise TraceTimeoutError(
                f"{self._model} depends on the values of its inputs, and running its steps on the "
                f"CPU took more than {self._limit_s:g} s; give an example of fewer or smaller "
                "samples, or more trace_seconds"
            )
        if seconds > SLOW_S and self._progress is None:
            self._progress = ExitStack()
            self._progress.enter_context(self._show())


_LIMIT: ContextVar[TimeLimit | None] = ContextVar("limit of runs on values", default=None)


def check_time() -> None:
    """Check the limit that applies to this thread, if there is one."""
    limit = _LIMIT.get()
    if limit is not None:
        limit.check()
