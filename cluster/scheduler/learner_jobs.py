"""The learner's queue of jobs, and whether its heads know all that was measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from trappm.cluster.scheduler.messages import Learn, Plan


class LearnerJobs:
    """The jobs of one learner: trainings, and choices of what to measure next."""

    def __init__(self) -> None:
        self.current: Plan | Learn | None = None
        """What it does now."""
        self.training_s: float | None = None
        """How long the last training took, with the choices that followed it."""
        self.has_heads = False
        self.has_tried = False
        """A training began before, in this process."""
        self.knows_all = False
        """No assignment has ended since the last training began."""
        self._waiting: deque[Plan | Learn] = deque()
        self._since = 0.0
        self._includes_training = False
        """There was a training among the jobs since then."""

    @property
    def is_idle(self) -> bool:
        """Nothing waits, and nothing is being done."""
        return self.current is None and not self._waiting

    def add(self, jobs: Iterable[Plan | Learn]) -> None:
        self._waiting.extend(jobs)

    def begin(self, jobs: Iterable[Plan | Learn], time: float) -> None:
        """Jobs that follow when all earlier ones have ended."""
        self._waiting.extend(jobs)
        self._since = time

    def next(self) -> Plan | Learn | None:
        """The next job, which the learner does from now on; None if there is none."""
        if self._waiting:
            self.current = self._waiting.popleft()
            if isinstance(self.current, Learn):
                self._includes_training = self.has_tried = self.knows_all = True
        return self.current

    def end(self, time: float) -> None:
        """The current job has ended."""
        if isinstance(self.current, Learn) and not self.has_heads:
            self._waiting.clear()  # there is nothing to choose by
        self.current = None
        if self._includes_training and not self._waiting:
            self.training_s = time - self._since
            self._includes_training = False

    def drop_plans(self) -> None:
        """Nothing more is to be chosen."""
        self._waiting = deque(job for job in self._waiting if isinstance(job, Learn))

    def drop_all(self) -> None:
        self._waiting.clear()
