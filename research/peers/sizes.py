"""How large the networks of the baselines are: as published, or for a laptop core."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trappm.learner.paper.presets import LAPTOP, PAPER, Training


@dataclass(frozen=True, kw_only=True)
class Size:
    """Width of every hidden layer, and the training that all baselines of this size get."""

    width: int
    training: Training


LAPTOP_SIZE = Size(width=64, training=replace(LAPTOP.head, weight_decay=1e-4))
PAPER_SIZE = Size(width=512, training=PAPER.head)
SIZES = {"laptop": LAPTOP_SIZE, "paper": PAPER_SIZE}
