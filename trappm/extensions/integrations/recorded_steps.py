"""What the steps of a training took, as a line of JSON that `trappm labels import` takes.

It is no measurement: loaders, loggers and other people share the machine, so the label is
`imported`, by the protocol `in-training`, and its environment names no version of ours that
measured. Its stack is therefore another one, and heads never mix it with what was measured alone.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trappm.extensions.integrations.forecast import FirstStep
from trappm.profiler.devices.catalogue import read_name
from trappm.profiler.errors import InputError
from trappm.profiler.files.json_lines import JsonLines
from trappm.profiler.host.environment import host_facts, utc_now
from trappm.profiler.models.on_meta import is_compiled, on_meta
from trappm.profiler.records import (
    Configuration,
    Measurement,
    Outcome,
    Protocol,
    Provenance,
    is_cpu_device,
)
from trappm.profiler.records.step_scope import IN_TRAINING, RECORDED
from trappm.profiler.steps.sampling import summarize

if TYPE_CHECKING:
    from torch import nn

PROTOCOL = Protocol(name=IN_TRAINING, warmup_steps=5, min_steps=10, max_steps=50)
_OTHER_HEAD = 4
"""Parameters in which a model may differ from its name: weight and bias of another head."""


@dataclass(kw_only=True)
class RecordedSteps:
    """Times the steps of one training after its warm-up."""

    framework: str
    samples_ms: list[float] = field(default_factory=list)
    _started_at: str = field(default_factory=utc_now)
    _begin: float | None = None
    _count: int = 0

    def begin(self) -> None:
        self._begin = time.perf_counter()

    def end(self, first: FirstStep, batches: int = 1) -> None:
        """Of so many batches; the GPU is waited for, so that the time is that of the whole step."""
        if self._begin is None or len(self.samples_ms) == PROTOCOL.max_steps:
            return
        if first.device.type == "cuda":
            import torch

            torch.cuda.synchronize(first.device)
        self._count += 1
        if self._count > PROTOCOL.warmup_steps:
            self.samples_ms.append((time.perf_counter() - self._begin) * 1000 / batches)
        self._begin = None

    @property
    def are_enough(self) -> bool:
        return len(self.samples_ms) >= PROTOCOL.min_steps

    def write(self, first: FirstStep, file: Path) -> Measurement:
        """Appends the record to a file.

        Raises:
            TrappmError: nobody could use it, with the reason; or the file cannot be written.
        """
        record = self._record(first)
        with JsonLines(file, Measurement) as lines:
            lines.append(record)
        return record

    def _record(self, first: FirstStep) -> Measurement:
        if not self.are_enough:
            needed = PROTOCOL.warmup_steps + PROTOCOL.min_steps
            raise InputError(f"{self._count} steps were timed; a label takes {needed} or more")
        if first.processes > 1 or first.accumulation_steps > 1:
            raise InputError("only steps of one process without accumulation are comparable")
        if is_compiled(first.model):
            raise InputError("the model is compiled, and labels are of steps in eager mode")
        device = first.device_name
        key = device if is_cpu_device(device) else read_name(device).key
        samples_ms = tuple(self.samples_ms)
        unknown = "a training's own memory and power were not measured"
        return Measurement(
            configuration=configuration_of(first),
            device=key,
            outcome=Outcome.OK,
            protocol=PROTOCOL,
            started_at=self._started_at,
            duration_s=sum(samples_ms) / 1000,
            provenance=Provenance.IMPORTED,
            step_samples_ms=samples_ms,
            step=summarize(samples_ms),
            missing=dict.fromkeys(("memory_mib", "power_w", "energy_j"), unknown),
            environment=self._environment(first, key, device),
        )

    def _environment(self, first: FirstStep, key: str, device: str) -> dict[str, Any]:
        facts = host_facts()
        del facts["measuring_version"]  # what it did not measure it does not vouch for
        return {
            **facts,
            "device": key,
            "device_name": facts["cpu_model"] if is_cpu_device(key) else device,
            "source": RECORDED,
            "recorded_by": self.framework,
            "model_class": type(first.model).__name__,
            "parameters": sum(p.numel() for p in first.model.parameters()),
        }


def configuration_of(first: FirstStep) -> Configuration:
    """What was trained; `input_size` is the last axis of the first tensor: pixels, or tokens.

    Raises:
        InputError: the model has no name, or is another one than its name's.
    """
    if first.name is None:
        raise InputError("the model has no name; give the callback timm's or hf:'s")
    tensor = first.first_tensor
    what = Configuration(
        architecture=first.name,
        batch_size=tensor.shape[0],
        input_size=tensor.shape[-1],
        precision=first.precision,
        optimizer=first.loop.optimizer,
    )
    named = on_meta(what.architecture, what.input_size)
    ours, theirs = _shapes(first.model), _shapes(named)
    unlike = max((ours - theirs).total(), (theirs - ours).total())
    if unlike > _OTHER_HEAD:
        raise InputError(
            f"{unlike} parameters of {type(first.model).__name__} are not those of {first.name}; "
            "give the callback the name of what it trains"
        )
    return what


def _shapes(model: nn.Module) -> Counter[tuple[int, ...]]:
    return Counter(tuple(p.shape) for p in model.parameters())
