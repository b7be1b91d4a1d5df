"""Devices that run nothing, on which a campaign is rehearsed.

`simulated:` answers from a data sheet and `replay:` from a file. Everything about such a campaign
is as always, but for its end: it publishes no snapshot, since nobody owns the device that one
would speak of, and simulated labels never train a published one.
"""

from __future__ import annotations

from collections.abc import Iterable

from trappm.learner.training_label import TrainingLabel
from trappm.profiler.records import Provenance


def runs_nothing(device: str) -> bool:
    """Whether the device of this key only answers, and measures nothing."""
    return device.startswith(("simulated:", "replay:"))


def rehearsal_line(devices: Iterable[str]) -> str | None:
    """What to tell before a campaign on these devices begins; None if all of them are real."""
    names = ", ".join(device for device in devices if runs_nothing(device))
    if not names:
        return None
    return f"a rehearsal: {names} runs nothing, so no snapshot will be published"


def unfit_to_publish(labels: Iterable[TrainingLabel]) -> str | None:
    """Why no snapshot may come of these labels; None if one may."""
    simulated = Provenance.SIMULATED
    unfit = {x.device for x in labels if x.provenance == simulated or runs_nothing(x.device)}
    if not unfit:
        return None
    return f"the labels of {', '.join(sorted(unfit))} come from no device that was measured here"
