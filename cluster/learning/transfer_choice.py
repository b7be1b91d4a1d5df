"""Whether a target's heads are published as they started from the source's, or from scratch.

Cross-validation over the target's training labels decides, metric by metric; folds hold whole
architectures out, and the evaluation set has no part. The source's heads have seen the
architectures of a fold, which favours transfer: what loses all the same is not published.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from trappm.cluster.scheduler.training_report import TransferErrors
from trappm.learner.heads.device_heads import Heads
from trappm.learner.heads.predictions import DeviceHeads
from trappm.learner.stats.errors import Accuracy
from trappm.learner.training_label import TrainingLabel

FOLDS = 3
LEAST_TRAINING_LABELS = 4
"""A device with fewer training labels gets no heads yet."""

Train = Callable[[Sequence[TrainingLabel], DeviceHeads | None], DeviceHeads]
"""Makes heads of labels, from the heads of another device or from scratch."""
Judge = Callable[[DeviceHeads, Sequence[TrainingLabel]], Mapping[str, Accuracy]]


def cross_validated(
    labels: Sequence[TrainingLabel],
    groups: Sequence[str],
    source: DeviceHeads,
    train: Train,
    judge: Judge,
) -> dict[str, TransferErrors]:
    """By metric, the mean error of both ways to start on architectures held out.

    Args:
        labels: of the target, for training (n).
        groups: the architecture of each (n).
        source: the heads that transfer starts from.
        train: makes heads.
        judge: gives their errors on labels.
    """
    names = sorted(set(groups))
    sums: dict[str, tuple[float, float, int]] = {}
    for fold in range(FOLDS):
        out = set(names[fold::FOLDS])
        held_out = [label for label, group in zip(labels, groups, strict=True) if group in out]
        rest = [label for label, group in zip(labels, groups, strict=True) if group not in out]
        if len(rest) < LEAST_TRAINING_LABELS or not held_out:
            continue
        transferred, scratch = (judge(train(rest, init), held_out) for init in (source, None))
        for metric in transferred.keys() & scratch.keys():
            count, before = transferred[metric]["count"], sums.get(metric, (0.0, 0.0, 0))
            sums[metric] = (
                before[0] + count * transferred[metric]["mape"],
                before[1] + count * scratch[metric]["mape"],
                before[2] + count,
            )
    return {metric: TransferErrors(t / n, s / n) for metric, (t, s, n) in sums.items()}


def better_heads(
    transferred: DeviceHeads, scratch: DeviceHeads, errors: Mapping[str, TransferErrors]
) -> tuple[DeviceHeads, list[str]]:
    """The heads of each metric that start better, and the metrics where that is from scratch.

    Heads of another kind, which cannot be divided, are from scratch where most metrics lost.
    """
    lost = sorted(metric for metric, e in errors.items() if e.transferred > e.from_scratch)
    if not lost:
        return transferred, []
    if isinstance(transferred, Heads) and isinstance(scratch, Heads):
        return replace(
            transferred,
            heads={**transferred.heads, **{m: h for m, h in scratch.heads.items() if m in lost}},
        ), lost
    return (scratch, sorted(errors)) if 2 * len(lost) > len(errors) else (transferred, [])
