"""The campaign's learner, provided by a Ray actor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from cluster.crew import Choice, ChoiceRequest, OnProgress, TrainingLabel
from cluster.runtime import first_line, here
from profiler.errors import CampaignError, TrappmError
from profiler.records import Configuration

POLL_S = 0.2

LIVES = 3
"""A learner that dies, such as of too little memory, is started again so many times less one."""


class LearnerProxy:
    """The learner actor behind the loop's `Learner` interface.

    One that died is started again, is told what the dead one knew (its encoder is on disk, and its
    heads are trained again), and is asked again what killed the other.

    Args:
        learner: the class of the actor, if it is not `cluster.actors.LearnerActor`.
        arguments: of that class.
    """

    def __init__(self, *, learner: type[Any] | None = None, **arguments: Any) -> None:
        from cluster.actors import LearnerActor

        self._class = ray.remote(learner or LearnerActor)
        self._arguments = arguments
        self._lives = LIVES
        self._pool: Sequence[tuple[Configuration, bytes]] = ()
        self._steps: Mapping[tuple[str, int], bytes] | None = None
        self._labels: Sequence[TrainingLabel] | None = None
        self._actor = self._start()

    def set_pool(
        self,
        pool: Sequence[tuple[Configuration, bytes]],
        on_progress: OnProgress,
        steps: Mapping[tuple[str, int], bytes] | None = None,
    ) -> None:
        self._call("set_pool", pool, steps=steps, on_progress=on_progress)
        self._pool, self._steps = pool, steps

    def fit(self, labels: Sequence[TrainingLabel], on_progress: OnProgress) -> dict[str, Any]:
        report: dict[str, Any] = self._call("fit", labels, on_progress=on_progress)
        self._labels = labels
        return report

    def choose(self, request: ChoiceRequest) -> Sequence[Choice]:
        choices: Sequence[Choice] = self._call("choose", request)
        return choices

    def publish(self, registry: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
        info: dict[str, Any] = self._call("publish", registry, fields)
        return info

    def _start(self) -> Any:
        options = {**here(), "max_concurrency": 2}
        return self._class.options(**options).remote(**self._arguments)

    def _call(
        self, method: str, *arguments: Any, on_progress: OnProgress | None = None, **keywords: Any
    ) -> Any:
        while True:
            try:
                return self._ask(method, arguments, keywords, on_progress)
            except RayActorError as error:
                self._lives -= 1
                if not self._lives:
                    raise CampaignError(
                        f"the learner died {LIVES} times, the last time in {method} "
                        f"({first_line(error)}); nothing recorded is lost. See that its node has "
                        "memory to spare, then go on with: trappm campaign resume"
                    ) from error
            self._revive(method)

    def _revive(self, method: str) -> None:
        self._actor = self._start()
        if method != "set_pool" and self._pool:
            self._call("set_pool", self._pool, steps=self._steps)
            if method != "fit" and self._labels is not None:
                self._call("fit", self._labels)

    def _ask(
        self,
        method: str,
        arguments: Sequence[Any],
        keywords: Mapping[str, Any],
        on_progress: OnProgress | None,
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
