"""Rehearsals of campaigns on simulated and replayed devices.

`simulated:` devices reply from a data sheet, `replay:` devices from a file. Rehearsals publish no
snapshot, because their labels do not come from real hardware.
"""

from __future__ import annotations

from collections.abc import Iterable

from trappm.learner.training_label import TrainingLabel
from trappm.profiler.records import Provenance


def runs_nothing(device: str) -> bool:
    """Return whether a device is simulated or replayed."""
    return device.startswith(("simulated:", "replay:"))


def rehearsal_line(devices: Iterable[str]) -> str | None:
    """Return a line of news about simulated devices; None if all devices are real."""
    names = ", ".join(device for device in devices if runs_nothing(device))
    if not names:
        return None
    return f"a rehearsal: {names} runs nothing, so no snapshot will be published"


def unfit_to_publish(labels: Iterable[TrainingLabel]) -> str | None:
    """Return why labels must not train a snapshot; None if they may."""
    simulated = Provenance.SIMULATED
    unfit = {x.device for x in labels if x.provenance == simulated or runs_nothing(x.device)}
    if not unfit:
        return None
    return f"the labels of {', '.join(sorted(unfit))} come from no device that was measured here"
