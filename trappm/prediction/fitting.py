"""`trappm fits`: the largest batch that a card's memory holds, without labels or a trial.

The step's memory is simulated from its kept profile, so that a model that was asked about before
needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trappm.learner.heads.predictions import StepSettings
from trappm.prediction.estimate import beside_step_mib, capacity_of, largest_batch, loop_of
from trappm.prediction.models.subjects import Subject
from trappm.profiler.devices.capacity import USABLE_SHARE
from trappm.profiler.errors import InputError, UnsupportedModelError
from trappm.profiler.number_text import number_text
from trappm.profiler.records import MemoryFormat, Optimizer, Phase, Precision, member
from trappm.profiler.simulation.step_profile import StepProfile

_MIB_PER_GIB = 1024


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """The largest batch that fits a card."""

    model: str
    device: str
    phase: str
    precision: str
    memory_format: str
    optimizer: str
    largest_batch: int
    """0 if not even one sample fits into the share of memory that published runs could use."""
    memory_mib: float
    """What that batch takes; where none fits, one sample."""
    capacity_mib: float
    source: str
    """What the memory is simulated from: the model's own step, or that of a rebuilt module."""
    remarks: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {"sentence": str(self), **asdict(self)}

    def __str__(self) -> str:
        """The answer in a sentence."""
        doing = "trains" if self.phase == Phase.TRAIN else "infers"
        how = f"in {self.precision}" + (f" with {self.optimizer}" if doing == "trains" else "")
        used, most = (
            number_text(size / _MIB_PER_GIB, 3) for size in (self.memory_mib, self.capacity_mib)
        )
        free = f"{1 - USABLE_SHARE:.0%}"
        if not self.largest_batch:
            return (
                f"{self.model} does not fit {self.device} {how}: one sample takes {used} of {most} "
                f"GiB, of which {free} must stay free."
            )
        return (
            f"{self.model} {doing} on {self.device} with up to {self.largest_batch:,} samples a "
            f"step {how}: {used} of {most} GiB, simulated; {free} must stay free. To be safe, take "
            "the smaller batch that trappm predict names: even its upper bound fits."
        )


def fitting(
    subject: Subject,
    devices: Sequence[str],
    *,
    phase: str = Phase.TRAIN,
    precision: str = Precision.FP32,
    memory_format: str = MemoryFormat.CONTIGUOUS,
    optimizer: str = Optimizer.SGD,
) -> list[Fitting]:
    """The largest batch on each card, by bisection over simulated memory.

    Raises:
        InputError: no such card or setting, or a file that has one batch size only.
        UnsupportedModelError: no step of it can be traced.
    """
    which = member("phase", Phase, phase)
    arithmetic = member("precision", Precision, precision)
    layout = member("memory_format", MemoryFormat, memory_format)
    loop = loop_of(optimizer, arithmetic)
    capacities = {device: capacity_of(device) for device in devices}
    profile = subject.profile()
    only = profile.graph.fixed_batch_size
    if only is not None:
        raise InputError(f"{subject.name} has one batch size only, {only}; ask predict about it")
    # The optimizer has no part in what is traced.
    step = subject.step(StepSettings(arithmetic, layout, Optimizer.SGD))
    if not isinstance(step, StepProfile):
        raise UnsupportedModelError(f"no step of {subject.name} can be traced: {step}")
    rows = []
    for device, capacity_mib in capacities.items():
        beside_mib = beside_step_mib(device, which)

        def memory_mib(size: int, beside_mib: float = beside_mib) -> float:
            held = step.memory_in(loop, size, which).reserved_with_workspace_mib
            return held + beside_mib

        def fits(size: int, usable_mib: float = USABLE_SHARE * capacity_mib) -> bool:
            return memory_mib(size) <= usable_mib

        most = largest_batch(fits)
        rows.append(
            Fitting(
                model=subject.name,
                device=device,
                phase=which.value,
                precision=arithmetic.value,
                memory_format=layout.value,
                optimizer=optimizer,
                largest_batch=most,
                memory_mib=memory_mib(max(most, 1)),
                capacity_mib=capacity_mib,
                source=str(profile.step_source),
                remarks=tuple(filter(None, [profile.step_remark])),
            )
        )
    return rows
