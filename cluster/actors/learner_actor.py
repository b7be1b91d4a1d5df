"""The Ray actor that learns: encoder, heads and choices of one campaign in a process of its own.

A plain class; who starts one makes an actor of it with `ray.remote`. Import this module inside
`with ray_runtime(...)` only (see there).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trappm.cluster.learning.campaign_learner import CampaignLearner


class LearnerActor:
    """Holds the pool's graphs, the encoder and the heads; a second thread answers for progress."""

    def __init__(self, preset: str, strategy: str, source: str, seed: int, cache: Path) -> None:
        # Networks and encoders take all cores for each product; Ray gives its workers one. Heads
        # with physics are trained side by side instead (`trappm.learner.threads`).
        torch.set_num_threads(os.cpu_count() or 1)
        self._learner = CampaignLearner(
            preset=preset, strategy=strategy, source=source, seed=seed, cache=cache
        )
        self._progress = (0, 0)

    def progress(self) -> tuple[int, int]:
        return self._progress

    def call(self, method: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        self._progress = (0, 0)
        if method in {"set_pool", "fit"}:
            keywords = {**keywords, "on_progress": self._note}
        return getattr(self._learner, method)(*arguments, **keywords)

    def _note(self, done: int, total: int) -> None:
        self._progress = (done, total)
