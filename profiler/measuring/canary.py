"""The canary: a configuration that is measured repeatedly to notice changes of a node's speed.

    reading, reading, ...  --median of the first few-->  reference
    later reading / reference - 1 = drift:   |drift| <= drifting bound     ok
                                             beyond the stop bound, again  stop
                                             anything between              drifting

Broken fans, changed clocks and new neighbors do not make samples noisy; only a comparison over time
shows them. One reading beyond the bound may be chance, so a second in succession, which is due at
once, stops the node. A node that became faster is as suspicious as one that became slower.
"""

from __future__ import annotations

import dataclasses
import enum
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from trappm.profiler.errors import InputError
from trappm.profiler.host.environment import stack_fingerprint
from trappm.profiler.records import Configuration, Measurement, Outcome, is_cpu_device

SMALL = Configuration(architecture="resnet18", batch_size=4, input_size=224)
LARGE = Configuration(architecture="resnet50", batch_size=32, input_size=224)


def default_reference(device_key: str) -> Configuration:
    """Return the configuration of the canary: a small one for CPUs, a larger one for GPUs.

    A small step on a GPU waits for kernel launches and hardly shows a slower clock.
    """
    return SMALL if is_cpu_device(device_key) else LARGE


class CanaryDecision(enum.StrEnum):
    """Conclusion about a node from a reading."""

    OK = "ok"
    DRIFTING = "drifting"
    """Read again soon; labels are still taken."""
    STOP = "stop"
    """Measure no more until a person has examined the node."""


@dataclass(frozen=True, kw_only=True)
class CanaryPlan:
    """Configuration, interval and bounds of the canary.

    Raises:
        InputError: A bound or an interval that is not above 0, or bounds in the wrong order.
    """

    __pydantic_config__: ClassVar[Any] = {
        "extra": "forbid",
        "allow_inf_nan": False,
        "use_attribute_docstrings": True,
    }

    configuration: Configuration | None = None
    """None: `default_reference` of the device."""
    every_measurements: int = 50
    every_s: float = 1800.0
    """A reading is due after this time, or after `every_measurements`."""
    reference_readings: int = 5
    """The reference is the median of this number of first readings."""
    drifting_relative: float = 0.05
    stop_relative: float = 0.15
    confirmations: int = 2
    """Successive failed readings or readings beyond `stop_relative` that stop the node."""

    def reference_on(self, device_key: str) -> Configuration:
        return self.configuration or default_reference(device_key)

    def __post_init__(self) -> None:
        for name in ("every_measurements", "every_s", "reference_readings", "confirmations"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} of the canary is {getattr(self, name)}; it must be > 0")
        if not 0 < self.drifting_relative <= self.stop_relative:
            raise InputError(
                f"the canary is drifting beyond {self.drifting_relative} and stops beyond "
                f"{self.stop_relative}; the first must be above 0 and not above the second"
            )


@dataclass(frozen=True, kw_only=True)
class CanaryReading:
    """One measurement of the canary, its reference, and the decision."""

    attempt_key: str
    """Key of the measurement; recording it twice has no effect."""
    taken_at: str
    """UTC, ISO 8601."""
    host: str
    """Host; for a GPU with its UUID, since each GPU ages by itself."""
    device: str
    stack_fingerprint: str
    configuration: Configuration
    protocol: str
    outcome: Outcome
    step_time_ms: float | None
    """None unless the outcome is `ok`; also `memory_mib` and `power_w`."""
    memory_mib: float | None
    power_w: float | None
    reference_ms: float | None
    """Step time of the reference; None for the first reading."""
    relative_drift: float | None
    """step_time_ms / reference_ms - 1; None if either is missing."""
    decision: CanaryDecision
    message: str | None = None
    """Reason for decisions other than `ok`."""

    @property
    def series(self) -> tuple[object, ...]:
        """Readings with equal series are comparable."""
        return (
            self.host, self.device, self.stack_fingerprint, self.configuration, self.protocol
        )  # fmt: skip


def read_canary(
    measurement: Measurement, history: Iterable[CanaryReading], plan: CanaryPlan
) -> CanaryReading:
    """Return the reading of a measurement of the canary.

    Args:
        measurement: Measurement of the canary's configuration.
        history: Earlier readings, the oldest first; other series are ignored.
        plan: Bounds.
    """
    ok, facts = measurement.outcome is Outcome.OK, measurement.environment
    reading = CanaryReading(
        attempt_key=measurement.attempt_key,
        taken_at=measurement.started_at,
        host=" ".join(str(facts[name]) for name in ("host", "device_uuid") if facts.get(name)),
        device=measurement.device,
        stack_fingerprint=stack_fingerprint(facts),
        configuration=measurement.configuration,
        protocol=measurement.protocol.name,
        outcome=measurement.outcome,
        step_time_ms=measurement.step_time_ms if ok else None,
        memory_mib=measurement.memory_mib if ok else None,
        power_w=measurement.power_w if ok else None,
        reference_ms=None,
        relative_drift=None,
        decision=CanaryDecision.OK,
    )
    before = [earlier for earlier in history if earlier.series == reading.series]
    known_ms = [
        r.step_time_ms for r in _trusted_readings(before, plan) if r.step_time_ms is not None
    ]
    reference_ms = statistics.median(known_ms[: plan.reference_readings]) if known_ms else None
    drift = None
    if reading.step_time_ms is not None and reference_ms is not None:
        drift = reading.step_time_ms / reference_ms - 1
    reading = dataclasses.replace(reading, reference_ms=reference_ms, relative_drift=drift)
    decision, message = _decide(reading, before, plan, measurement.message)
    return dataclasses.replace(reading, decision=decision, message=message)


def _trusted_readings(before: Iterable[CanaryReading], plan: CanaryPlan) -> list[CanaryReading]:
    """Return the readings that may set the reference: all except those that stopped the node.

    Otherwise a node that is slow from the start would become its own reference.
    """
    trusted: list[CanaryReading] = []
    for reading in before:
        trusted.append(reading)
        if reading.decision is CanaryDecision.STOP:
            while trusted and _is_beyond(trusted[-1], plan):
                trusted.pop()
    return trusted


def _decide(
    reading: CanaryReading, before: Sequence[CanaryReading], plan: CanaryPlan, failure: str | None
) -> tuple[CanaryDecision, str | None]:
    latest = [*before, reading][-plan.confirmations :]
    confirmed = len(latest) == plan.confirmations and all(_is_beyond(r, plan) for r in latest)
    if reading.step_time_ms is None:
        message = f"the canary could not be measured: {reading.outcome}: {failure}"
    else:
        drift = reading.relative_drift
        if drift is None or abs(drift) <= plan.drifting_relative:
            return CanaryDecision.OK, None
        bound = plan.stop_relative if confirmed else plan.drifting_relative
        message = (
            f"the canary takes {reading.step_time_ms:.2f} ms, {drift:+.1%} off its reference of "
            f"{reading.reference_ms:.2f} ms (bound {bound:.1%})"
        )
    return (CanaryDecision.STOP if confirmed else CanaryDecision.DRIFTING), message


def _is_beyond(reading: CanaryReading, plan: CanaryPlan) -> bool:
    if reading.relative_drift is not None:
        return abs(reading.relative_drift) > plan.stop_relative
    # An unstable run points to a busy host, which the labels' own stability check deals with.
    return reading.outcome not in {Outcome.OK, Outcome.UNSTABLE}


class CanaryWatch:
    """Schedule and history of the readings of one node and device.

    Args:
        plan: Intervals and bounds.
        history: Earlier readings of this node, the oldest first.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        plan: CanaryPlan,
        *,
        history: Iterable[CanaryReading] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = plan
        self._clock = clock
        self._measurements = 0
        self._read_at: float | None = None
        self.readings = list(history)

    def is_due(self) -> bool:
        """Return whether to measure the canary next; True at first in every process.

        A reading that was not `ok` is confirmed at once. Known mild drift makes no further readings
        due.
        """
        return (
            self._read_at is None
            or self._is_to_confirm()
            or self._measurements >= self._plan.every_measurements
            or self._clock() - self._read_at >= self._plan.every_s
        )

    def count_measurement(self) -> None:
        """Count a measurement of another configuration."""
        self._measurements += 1

    def take(self, measurement: Measurement) -> CanaryReading:
        reading = read_canary(measurement, self.readings, self._plan)
        self.readings.append(reading)
        self._read_at, self._measurements = self._clock(), 0
        return reading

    def _is_to_confirm(self) -> bool:
        latest = self.readings[-self._plan.confirmations :]
        off = [reading.decision is not CanaryDecision.OK for reading in latest]
        return off[-1] and (_is_beyond(self.readings[-1], self._plan) or not all(off))
