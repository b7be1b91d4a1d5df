"""Forecast, step times and record of one training run, shared by the trainer callbacks.

The record is one line of JSON for `trappm labels import`. Data loaders, loggers and other users
share the machine, so the label is not a measurement: its provenance is `imported`, its protocol
`in-training`, and its environment has no measuring version. It therefore has a separate stack, and
heads never mix it with isolated measurements.
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

from trappm.extensions.integrations.forecast import TrainingContext, duration, forecast
from trappm.extensions.integrations.json_lines import JsonLines
from trappm.profiler.devices.catalogue import read_name
from trappm.profiler.errors import InputError, TrappmError, one_line
from trappm.profiler.host.environment import host_facts, utc_now
from trappm.profiler.models.known_names import refuse_unknown
from trappm.profiler.models.on_meta import on_meta
from trappm.profiler.models.sources import source_of
from trappm.profiler.records import (
    Configuration,
    Execution,
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
"""Number of parameter tensors that may differ from the named model, such as a replaced head's."""


@dataclass(kw_only=True)
class RecordedSteps:
    """Step times of one training run after its warm-up."""

    framework: str
    samples_ms: list[float] = field(default_factory=list)
    _started_at: str = field(default_factory=utc_now)
    _begin: float | None = None
    _count: int = 0

    def begin(self) -> None:
        self._begin = time.perf_counter()

    def end(self, context: TrainingContext, batches: int = 1) -> None:
        """End a step of n batches, and wait for the GPU so that the whole step is timed."""
        if self._begin is None or len(self.samples_ms) == PROTOCOL.max_steps:
            return
        if context.device.type == "cuda":
            import torch

            torch.cuda.synchronize(context.device)
        self._count += 1
        if self._count > PROTOCOL.warmup_steps:
            self.samples_ms.append((time.perf_counter() - self._begin) * 1000 / batches)
        self._begin = None

    @property
    def are_enough(self) -> bool:
        return len(self.samples_ms) >= PROTOCOL.min_steps

    def write(self, context: TrainingContext, file: Path) -> Measurement:
        """Append the record to a file.

        Raises:
            TrappmError: The record would not be usable, or the file cannot be written.
        """
        record = self._record(context)
        with JsonLines(file) as lines:
            lines.append(record)
        return record

    def _record(self, context: TrainingContext) -> Measurement:
        if not self.are_enough:
            needed = PROTOCOL.warmup_steps + PROTOCOL.min_steps
            raise InputError(f"{self._count} steps were timed; a label needs {needed} or more")
        if context.processes > 1 or context.accumulation_steps > 1:
            raise InputError("only steps of one process without accumulation are comparable")
        device = context.device_name
        key = device if is_cpu_device(device) else read_name(device).key
        samples_ms = tuple(self.samples_ms)
        unknown = "memory and power were not measured during training"
        return Measurement(
            configuration=configuration_of(context),
            device=key,
            outcome=Outcome.OK,
            protocol=PROTOCOL,
            started_at=self._started_at,
            duration_s=sum(samples_ms) / 1000,
            provenance=Provenance.IMPORTED,
            step_samples_ms=samples_ms,
            step=summarize(samples_ms),
            missing=dict.fromkeys(("memory_mib", "power_w", "energy_j"), unknown),
            environment=self._environment(context, key, device),
        )

    def _environment(self, context: TrainingContext, key: str, device: str) -> dict[str, Any]:
        facts = host_facts()
        del facts["measuring_version"]  # TraPPM did not measure these steps in isolation
        return {
            **facts,
            "device": key,
            "device_name": facts["cpu_model"] if is_cpu_device(key) else device,
            "source": RECORDED,
            "recorded_by": self.framework,
            "model_class": type(context.model).__name__,
            "parameters": sum(p.numel() for p in context.model.parameters()),
        }


def configuration_of(context: TrainingContext) -> Configuration:
    """Return the trained configuration; `input_size` is the last axis of the first tensor.

    Raises:
        InputError: The model has no name, or does not match its name.
    """
    if context.name is None:
        raise InputError("the model has no name; give the callback a timm or hf: name")
    tensor = context.first_tensor
    what = Configuration(
        architecture=context.name,
        batch_size=tensor.shape[0],
        input_size=tensor.shape[-1],
        precision=context.precision,
        optimizer=context.loop.optimizer,
        execution=Execution.COMPILE if context.is_compiled else Execution.EAGER,
    )
    named = on_meta(what.architecture, what.input_size)
    ours, theirs = _shapes(context.model), _shapes(named)
    unlike = max((ours - theirs).total(), (theirs - ours).total())
    if unlike > _OTHER_HEAD:
        raise InputError(
            f"{unlike} parameters of {type(context.model).__name__} differ from {context.name}; "
            "give the callback the name of the trained model"
        )
    return what


def _shapes(model: nn.Module) -> Counter[tuple[int, ...]]:
    return Counter(tuple(p.shape) for p in model.parameters())


class TrainingWatch:
    """Watch of one training run; errors are reported and never stop the run.

    Args:
        framework: Name of the training framework.
        model_name: timm name, or a transformer such as `hf:gpt2`; without a name the step time is
            reported only after some steps.
        record_to: JSON lines file to append to, for `trappm labels import`.
        device: GPU to forecast for (default: the device in use).

    Raises:
        InputError, UnknownArchitectureError: Unknown model, or `record_to` without a name.
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
                "record_to needs a timm or hf: model_name, such as model_name='resnet18', because "
                "a label must name its model"
            )
        self.model_name = None if model_name is None else checked_name(model_name)
        self._file = None if record_to is None else Path(record_to)
        self._device = device
        self._steps = RecordedSteps(framework=framework)
        self._context: TrainingContext | None = None
        self._has_looked = False
        self._time_is_due = False

    def look(self, make: Callable[[], TrainingContext]) -> None:
        """Print the forecast before the first step; later calls do nothing."""
        if self._has_looked:
            return
        self._has_looked = True
        try:
            self._context = make()
        except Exception as error:  # an unknown trainer may raise anything
            say(f"steps will be neither forecast nor timed: {one_line(error)}")
            return
        self._time_is_due = True
        try:
            what = forecast(self._context, self._device)
            self._time_is_due = what.time_missing is not None
            say(str(what))
        except Exception as error:  # an unknown module may raise anything
            say(f"no forecast; the step time is reported after some steps: {one_line(error)}")

    def begin(self) -> None:
        """Begin a step after its batch has been loaded."""
        self._steps.begin()

    def end(self, batches: int = 1) -> None:
        """End a step of n batches, and report its time if it is due."""
        if self._context is None:
            return
        self._steps.end(self._context, batches)
        if self._time_is_due and self._steps.are_enough:
            self._say_time(self._context)

    def finish(self) -> None:
        """End the training run: report a step time that is still due, and write the record."""
        if self._context is None:
            return
        if self._time_is_due and self._steps.samples_ms:
            self._say_time(self._context)
        if self._file is None:
            return
        try:
            record = self._steps.write(self._context, self._file)
        except TrappmError as error:
            say(f"steps were not recorded: {error}")
        else:
            say(
                f"{record.configuration} took {record.step_time_ms:,.1f} ms per step in this run; "
                f"import the label with: trappm labels import {self._file}"
            )

    def _say_time(self, context: TrainingContext) -> None:
        self._time_is_due = False
        steps_ms = self._steps.samples_ms
        text = f"a step takes {median(steps_ms):,.1f} ms"
        if context.epoch_batches is not None:
            text += f", an epoch about {duration(context.epoch_batches * median(steps_ms) / 1000)}"
        warmup = PROTOCOL.warmup_steps
        say(f"{text} (measured over {len(steps_ms)} steps after {warmup} warm-up steps)")


def checked_name(model_name: str) -> str:
    """Return the canonical name of a model.

    Raises:
        InputError, UnknownArchitectureError: Unknown model.
    """
    refuse_unknown(model_name)
    return source_of(model_name).check(model_name)


def say(text: str) -> None:
    """Print a line of a callback."""
    typer.echo(f"TraPPM: {text}")


def say_batch(name: str, chosen: int | str, most: int) -> None:
    """Print the batch size that a trainer takes now, or why it takes the one from before.

    Args:
        name: Name of the setting.
        chosen: Largest batch size that is predicted to fit, or why it is unknown.
        most: Largest batch size to take.
    """
    if isinstance(chosen, str):
        say(f"{name} stays as it is: {chosen}")
    elif chosen > most:
        say(f"{name} is {most:,}, of {chosen:,} predicted to fit")
    else:
        say(f"{name} is {chosen:,}, the largest predicted to fit")
