"""One training watched by a trainer's callback: the forecast, timed steps, and their record.

The record is a line of JSON for `trappm labels import`. It is no measurement: loaders, loggers and
other people share the machine, so the label is `imported`, by the protocol `in-training`, and its
environment names no measuring version. Its stack is therefore another one, and heads never mix it
with what was measured alone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import typer

from trappm.extensions.integrations.forecast import FirstStep, forecast
from trappm.profiler.devices.catalogue import read_name
from trappm.profiler.errors import InputError, TrappmError, one_line
from trappm.profiler.files.json_lines import JsonLines
from trappm.profiler.host.environment import host_facts, utc_now
from trappm.profiler.measuring.sweep import duration
from trappm.profiler.models.known_names import refuse_unknown
from trappm.profiler.models.on_meta import is_compiled, on_meta
from trappm.profiler.models.sources import source_of
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


class TrainingWatch:
    """One training, from its first batch to its end; nothing that fails in here ends it.

    Args:
        framework: whose training it is.
        model_name: timm's, or a transformer's such as `hf:gpt2`; without one the time is told
            when steps were measured.
        record_to: a file of JSON lines for `trappm labels import`; it grows.
        device: the card to forecast for; by default that of the training.

    Raises:
        InputError, UnknownArchitectureError: no such model, or a file and no name.
    """

    def __init__(
        self,
        framework: str,
        model_name: str | None = None,
        record_to: str | Path | None = None,
        device: str | None = None,
    ) -> None:
        if record_to is not None and model_name is None:
            raise InputError(
                "record_to needs model_name, of timm or hf:, such as model_name='resnet18': a "
                "label of a module without a name says nothing"
            )
        if model_name is not None:
            refuse_unknown(model_name)
            model_name = source_of(model_name).check(model_name)
        self.model_name = model_name
        self._file = None if record_to is None else Path(record_to)
        self._device = device
        self._steps = RecordedSteps(framework=framework)
        self._first: FirstStep | None = None
        self._has_looked = False
        self._time_is_due = False

    def look(self, make: Callable[[], FirstStep]) -> None:
        """At the first batch, before its step: says whether it fits and how long an epoch takes."""
        if self._has_looked:
            return
        self._has_looked = True
        try:
            self._first = make()
        except Exception as error:  # of a trainer of which nothing is known
            _say(f"these steps are neither forecast nor timed: {one_line(error)}")
            return
        self._time_is_due = True
        try:
            what = forecast(self._first, self._device)
            self._time_is_due = what.time_missing is not None
            _say(str(what))
        except Exception as error:  # of a module of which nothing is known
            _say(f"no forecast, the time is told once steps are measured: {one_line(error)}")

    def begin(self) -> None:
        """Of a step, when its batch is there."""
        self._steps.begin()

    def end(self, batches: int = 1) -> None:
        """Of a step over so many batches."""
        if self._first is None:
            return
        self._steps.end(self._first, batches)
        if self._time_is_due and self._steps.are_enough:
            self._say_time(self._first)

    def finish(self) -> None:
        """Of the training: what is left to say, and the record."""
        if self._first is None:
            return
        if self._time_is_due and self._steps.samples_ms:
            self._say_time(self._first)
        if self._file is None:
            return
        try:
            record = self._steps.write(self._first, self._file)
        except TrappmError as error:
            _say(f"these steps are not recorded: {error}")
        else:
            _say(
                f"{record.configuration} took {record.step_time_ms:,.1f} ms a step in this "
                f"training; keep it with: trappm labels import {self._file}"
            )

    def _say_time(self, first: FirstStep) -> None:
        self._time_is_due = False
        steps_ms = self._steps.samples_ms
        text = f"a step takes {median(steps_ms):,.1f} ms"
        if first.epoch_batches is not None:
            text += f", an epoch about {duration(first.epoch_batches * median(steps_ms) / 1000)}"
        _say(f"{text}, by {len(steps_ms)} measured steps after {PROTOCOL.warmup_steps}")


def _say(text: str) -> None:
    typer.echo(f"TraPPM: {text}")
