"""Promote a snapshot to an alias unless a metric regresses.

Each device and phase with heads in the new snapshot is compared with the snapshot that has
predicted it so far: the alias' current one, or else an earlier one. No metric may be missing, no
family of models may leave the pool, and no error may rise clearly. Errors are those in the
manifests, each on architectures that its heads had not seen. Evaluation sets are different draws,
so only a clear rise counts. For a pool with more families, only a far larger one counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from trappm.learner.snapshots.manifest import Manifest
from trappm.learner.snapshots.registry import Registry
from trappm.profiler.errors import SnapshotError
from trappm.profiler.records import number_text

BOUND_PERCENT, MIN_POINTS = 20.0, 1.0
"""Increase of a mean error, in percent of it and in percentage points, that is a regression (round
numbers: evaluation sets scatter, docs/research/accuracy.md)."""
OTHER_POOL_PERCENT = 100.0
"""The same where the new pool has more families (round number)."""

HeadName = tuple[str, str, str]
"""Device, phase, metric."""


@dataclass(frozen=True)
class Promotion:
    """Result of moving an alias: whether it was moved, and a message."""

    moved: bool
    message: str
    """Snapshot of the alias now, and why it was not moved."""
    remark: str | None = None
    """Reservation about a move."""


def promote(
    registry: Registry, alias: str, snapshot_id: str, bound_percent: float = BOUND_PERCENT
) -> Promotion:
    """Move an alias to a version, unless current heads would be lost or are clearly better.

    Raises:
        SnapshotError: There is no such version, or the registry cannot be written.
    """
    history = registry.history(alias)
    if history and history[-1].snapshot == snapshot_id:
        return Promotion(True, f"{alias} is {snapshot_id} already")
    after = registry.manifest(snapshot_id)
    remark, unweighed = None, _answers_for(after)
    for before in _read_manifests(registry, registry.meanings(alias)):
        both = unweighed & _answers_for(before)
        unweighed -= both
        against, new = _compare(before, after, both, bound_percent)
        remark = remark or new
        if against is not None:
            return Promotion(
                False,
                f"{alias} stays {history[-1].snapshot}, since {snapshot_id} {against}. To move it "
                f"all the same: trappm snapshot push {snapshot_id} --alias {alias} --registry "
                f"{registry.location}",
            )
    registry.set_alias(alias, snapshot_id, "published")
    message = f"{alias} is {snapshot_id}"
    return Promotion(True, message if remark is None else f"{message}; {remark}", remark)


def _read_manifests(registry: Registry, ids: Sequence[str]) -> Iterator[Manifest]:
    """Yield the manifests in order, without damaged or missing ones."""
    for snapshot_id in ids:
        with contextlib.suppress(SnapshotError):
            yield registry.manifest(snapshot_id)


def _answers_for(manifest: Manifest) -> set[tuple[str, str]]:
    """Return the devices and phases with heads."""
    return {(device, phase) for device, phase, _ in _heads(manifest)}


def _heads(manifest: Manifest) -> set[HeadName]:
    return {
        (device, phase, metric)
        for device, by_phase in manifest.heads.items()
        for phase, head in by_phase.items()
        for metric in head.metrics
    }


def _compare(
    before: Manifest, after: Manifest, both: Set[tuple[str, str]], bound_percent: float
) -> tuple[str | None, str | None]:
    """Return an objection to a new manifest and a remark, for devices and phases of both."""
    if not both:
        return None, None
    if missing := sorted(h for h in _heads(before) - _heads(after) if h[:2] in both):
        return f"has no head of {', '.join(map(' '.join, missing))}", None
    old, new = (set(m.families or ()) for m in (before, after))
    if before.families is not None and after.families is not None:
        if lost := sorted(old - new):
            return f"is of a pool without {', '.join(lost)}: errors cannot be compared", None
        if more := sorted(new - old):
            far_worse = regressions(before, after, OTHER_POOL_PERCENT, both)
            worse = regressions(before, after, bound_percent, both)
            larger = f"its pool has {', '.join(more)}, too"
            if far_worse:
                return f"regressed, though {larger}: {'; '.join(far_worse)}", None
            if worse:
                return None, f"{larger}, so that errors differ: {'; '.join(worse)}"
            return None, None
    worse = regressions(before, after, bound_percent, both)
    return (f"regressed: {'; '.join(worse)}" if worse else None), None


def regressions(
    before: Manifest,
    after: Manifest,
    bound_percent: float = BOUND_PERCENT,
    of: Set[tuple[str, str]] | None = None,
) -> list[str]:
    """Return a line for each head of `after` that is worse than that of `before`.

    Args:
        before: Manifest to compare with.
        after: Manifest to judge.
        bound_percent: Increase in percent of the error of `before`.
        of: Devices and phases to compare (default: all).
    """
    old, new = mean_errors(before), mean_errors(after)
    return [
        f"{' '.join(head)} was {number_text(old[head], 3)} % off, is {number_text(new[head], 3)} %"
        for head in sorted(set(old) & set(new))
        if of is None or head[:2] in of
        if new[head] > old[head] * (1 + bound_percent / 100) and new[head] > old[head] + MIN_POINTS
    ]


def mean_errors(manifest: Manifest) -> dict[HeadName, float]:
    """Return mean absolute percentage errors by head."""
    return {
        (device, phase, metric): float(errors.mape)
        for device, phases in (manifest.errors or {}).items()
        for phase, by_metric in phases.items()
        for metric, errors in by_metric.items()
        if errors.mape is not None
    }
