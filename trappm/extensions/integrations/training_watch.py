"""What callbacks of any trainer do: say what it will take, time the steps, keep what they took."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median

import typer

from trappm.extensions.integrations.forecast import FirstStep, forecast
from trappm.extensions.integrations.recorded_steps import PROTOCOL, RecordedSteps
from trappm.profiler.errors import InputError, TrappmError, one_line
from trappm.profiler.measuring.sweep import duration
from trappm.profiler.models.known_names import refuse_unknown
from trappm.profiler.models.sources import source_of


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
