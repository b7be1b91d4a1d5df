"""Moves an alias to a new snapshot, unless that is worse than the one it means now.

Errors are those in the manifests, each on architectures that its own heads had not seen. Of pools
with the same families of models they are different draws, so only a clear step back counts. Of
others they say nothing about each other: then what counts is that no family is lost. Devices that
the name's present meaning lacks are compared with what it meant before, which answers for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from trappm.learner.snapshots.manifest_fields import Manifest
from trappm.learner.snapshots.registry import Registry
from trappm.profiler.errors import SnapshotError
from trappm.profiler.number_text import number_text
from trappm.profiler.records import Phase

BOUND_PERCENT = 20.0
"""A mean error that is this much larger is a regression ..."""
LEAST_POINTS = 1.0
"""... if it is also larger by so many percentage points. Round numbers: evaluation sets of two
campaigns are different draws, which scatter (docs/accuracy.md)."""

HeadName = tuple[str, str, str]
"""Device, phase, metric."""


@dataclass(frozen=True)
class Promotion:
    """The outcome of moving an alias: whether it was moved, and a message."""

    moved: bool
    message: str
    """What the name means now, and why it was not moved."""
    remark: str | None = None
    """Why errors could not be compared, where it was moved all the same."""


def promote(
    registry: Registry, alias: str, snapshot_id: str, bound_percent: float = BOUND_PERCENT
) -> Promotion:
    """Moves an alias to a version, unless it regressed against what the alias means now, or, for
    the same device, its campaign's pool lacks families of models that the other one had.

    Raises:
        SnapshotError: no such version, or a registry that cannot be written.
    """
    history = registry.history(alias)
    if history and history[-1].snapshot == snapshot_id:
        return Promotion(True, f"{alias} is {snapshot_id} already")
    after = registry.manifest(snapshot_id)
    remark, seen = None, set[str]()
    for before in _readable(registry, registry.meanings(alias)):
        devices = _judged(before) - seen
        seen |= devices
        against, new = _weighed(before, after, devices & _judged(after), bound_percent)
        remark = remark or new
        if against is not None:
            return Promotion(
                False,
                f"{alias} stays {history[-1].snapshot}, since {snapshot_id} {against}. To move it "
                f"all the same: trappm snapshot alias {alias} {snapshot_id} --registry "
                f"{registry.location}",
            )
        if _judged(after) <= seen:
            break
    registry.set_alias(alias, snapshot_id, "published")
    message = f"{alias} is {snapshot_id}"
    return Promotion(True, message if remark is None else f"{message}; {remark}", remark)


def _readable(registry: Registry, ids: Sequence[str]) -> Iterator[Manifest]:
    """What answers with these, in their order; than what is damaged or gone anything is better."""
    for snapshot_id in ids:
        with contextlib.suppress(SnapshotError):
            yield registry.manifest(snapshot_id)


def _judged(manifest: Manifest) -> set[str]:
    return {device for device, _, _ in mean_errors(manifest)}


def _weighed(
    before: Manifest, after: Manifest, devices: Set[str], bound_percent: float
) -> tuple[str | None, str | None]:
    """What speaks against a new manifest on these devices, and else a remark; None for nothing."""
    if not devices:
        return None, None
    old, new = (set(m.families or ()) for m in (before, after))
    if before.families is None or after.families is None or old == new:
        worse = regressions(before, after, bound_percent, devices)
        return (f"regressed: {'; '.join(worse)}" if worse else None), None
    if lost := sorted(old - new):
        return f"is of a pool without {', '.join(lost)}: errors cannot be compared", None
    return None, f"its pool has {', '.join(sorted(new - old))}, too: errors cannot be compared"


def regressions(
    before: Manifest,
    after: Manifest,
    bound_percent: float = BOUND_PERCENT,
    devices: Set[str] | None = None,
) -> list[str]:
    """The heads of a manifest that are worse than another's by more than the bound.

    Args:
        before: the other one.
        after: the one that is judged.
        bound_percent: of the other one's error.
        devices: these only; all without it.
    """
    old, new = mean_errors(before), mean_errors(after)
    return [
        f"{' '.join(head)} was {number_text(old[head], 3)} % off, is {number_text(new[head], 3)} %"
        for head in sorted(set(old) & set(new))
        if devices is None or head[0] in devices
        if new[head] > old[head] * (1 + bound_percent / 100)
        and new[head] > old[head] + LEAST_POINTS
    ]


def mean_errors(manifest: Manifest) -> dict[HeadName, float]:
    """Mean absolute percentage errors in a manifest, by head.

    Campaigns judge the phases of a device together: their errors count for training.
    """
    errors_by_head: dict[HeadName, float] = {}
    for device in manifest.errors or {}:
        for phase, by_metric in manifest.errors_by_phase(device).items():
            for metric, errors in by_metric.items():
                if errors.mape is not None:
                    errors_by_head[device, phase or Phase.TRAIN, metric] = float(errors.mape)
    return errors_by_head
