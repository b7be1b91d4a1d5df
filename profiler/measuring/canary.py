"""The canary: a configuration measured again and again shows when a node's speed has changed.

    reading, reading, ...  --median of the first few-->  reference
    later reading / reference - 1 = drift:   |drift| <= drifting bound     ok
                                             beyond the stop bound, again  stop
                                             anything between              drifting

A node whose fan fails, whose clocks were changed or whose neighbours woke up still measures, and
its samples may be steady: only a comparison with itself shows it. One reading beyond the bound may
be chance, so it takes a second in succession to stop, which is then due at once. A node that
became faster is as suspicious as one that became slower.
"""

from __future__ import annotations

import dataclasses
import enum
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from trappm.profiler.errors import InputError
from trappm.profiler.host.environment import stack_fingerprint
from trappm.profiler.records import Configuration, Measurement, Outcome, is_cpu_device

SMALL = Configuration(architecture="resnet18", batch_size=4, input_size=224)
LARGE = Configuration(architecture="resnet50", batch_size=32, input_size=224)


def default_reference(device_key: str) -> Configuration:
    """What the canary measures: a small step on cores of a host, a larger one anywhere else.

    On a GPU a small step waits for the host to launch its kernels, and hardly shows a slower clock;
    the larger one has some tens of milliseconds of arithmetic, and takes about 4 GiB. Both are
    known to every timm.
    """
    return SMALL if is_cpu_device(device_key) else LARGE


class CanaryDecision(enum.StrEnum):
    """What a reading shows about its node."""

    OK = "ok"
    DRIFTING = "drifting"
    """Look again before long; labels are still taken."""
    STOP = "stop"
    """The node is to measure no more until a person has examined it."""


@dataclass(frozen=True, kw_only=True)
class CanaryPlan:
    """What the canary measures, how often, and how far it may drift.

    Raises:
        InputError: a bound or interval that is not above 0, or bounds in the wrong order.
    """

    __pydantic_config__: ClassVar[Any] = {
        "extra": "forbid",
        "allow_inf_nan": False,
        "use_attribute_docstrings": True,
    }

    configuration: Configuration | None = None
    """None: what `default_reference` says for the device."""
    every_measurements: int = 50
    every_s: float = 1800.0
    """A reading is due after so many measurements or seconds, whichever comes first."""
    reference_readings: int = 5
    """The reference is the median of the first so many readings."""
    drifting_relative: float = 0.05
    stop_relative: float = 0.15
    confirmations: int = 2
    """Readings in succession beyond `stop_relative`, or that failed, which stop the node."""

    def reference_on(self, device_key: str) -> Configuration:
        """The configuration that is measured on this device."""
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
    """One measurement of the canary, what it was compared with, and what follows from it."""

    attempt_key: str
    """Of the measurement; recording the same key twice records it once."""
    taken_at: str
    """UTC, ISO 8601."""
    host: str
    """The host; of a GPU its UUID too, since each of a host's GPUs ages by itself."""
    device: str
    stack_fingerprint: str
    configuration: Configuration
    protocol: str
    """The protocol's name."""
    outcome: Outcome
    step_time_ms: float | None
    """None unless the outcome is `ok`; so are the two below, and where the metric is missing."""
    memory_mib: float | None
    power_w: float | None
    reference_ms: float | None
    """Step time that this one was compared with; None for the first one."""
    relative_drift: float | None
    """step_time_ms / reference_ms - 1; None where either is."""
    decision: CanaryDecision
    message: str | None = None
    """For decisions other than `ok`: why."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` is its inverse."""
        return {
            **dataclasses.asdict(self),
            "configuration": self.configuration.to_dict(),
            "outcome": self.outcome.value,
            "decision": self.decision.value,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return cls(
            **{
                **data,
                "configuration": Configuration(**data["configuration"]),
                "outcome": Outcome(data["outcome"]),
                "decision": CanaryDecision(data["decision"]),
            }
        )

    @property
    def series(self) -> tuple[object, ...]:
        """Readings may be compared where this is equal: same node, stack, question and protocol."""
        return (
            self.host, self.device, self.stack_fingerprint, self.configuration, self.protocol
        )  # fmt: skip


def read_canary(
    measurement: Measurement,
    history: Iterable[CanaryReading],
    plan: CanaryPlan,
) -> CanaryReading:
    """What a measurement of the canary's configuration says, given the readings before it.

    Args:
        history: earlier readings, the oldest first; those of other series do not count.
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
    known_ms = [r.step_time_ms for r in _trusted(before, plan) if r.step_time_ms is not None]
    reference_ms = statistics.median(known_ms[: plan.reference_readings]) if known_ms else None
    drift = None
    if reading.step_time_ms is not None and reference_ms is not None:
        drift = reading.step_time_ms / reference_ms - 1
    reading = dataclasses.replace(reading, reference_ms=reference_ms, relative_drift=drift)
    decision, message = _decide(reading, before, plan, measurement.message)
    return dataclasses.replace(reading, decision=decision, message=message)


def _trusted(before: Iterable[CanaryReading], plan: CanaryPlan) -> list[CanaryReading]:
    """The readings that may set the reference: all but those that stopped the node.

    Otherwise a node that is sick from early on would become its own reference, and pass when it is
    tried again.
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
    """Knows when a reading is due and what one says; for one node and device.

    Args:
        history: readings of this node from before, such as from the store; the oldest first.
        clock: seconds that never go backwards.
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
        """Whether the canary is to be measured next. It is at first, in every process.

        A reading that was not `ok` is confirmed at once; after that, mild drift is no reason to
        measure the canary more often than before.
        """
        return (
            self._read_at is None
            or self._is_to_confirm()
            or self._measurements >= self._plan.every_measurements
            or self._clock() - self._read_at >= self._plan.every_s
        )

    def count_measurement(self) -> None:
        """Notes that a measurement of something else is taken."""
        self._measurements += 1

    def take(self, measurement: Measurement) -> CanaryReading:
        """What this measurement of the canary says; the next one is due later, or at once."""
        reading = read_canary(measurement, self.readings, self._plan)
        self.readings.append(reading)
        self._read_at, self._measurements = self._clock(), 0
        return reading

    def _is_to_confirm(self) -> bool:
        latest = self.readings[-self._plan.confirmations :]
        off = [reading.decision is not CanaryDecision.OK for reading in latest]
        return off[-1] and (_is_beyond(self.readings[-1], self._plan) or not all(off))


class Canary(CanaryWatch):
    """A watch that takes its readings itself.

    Args:
        measure: one measurement of this configuration here, under the protocol of the labels.
        device_key: the device that it measures on.
        watch: of a `CanaryWatch`.
    """

    def __init__(
        self,
        plan: CanaryPlan,
        measure: Callable[[Configuration], Measurement],
        device_key: str,
        **watch: Any,
    ) -> None:
        super().__init__(plan, **watch)
        self._measure = measure
        self._configuration = plan.reference_on(device_key)

    def check(self) -> CanaryReading | None:
        """A new reading where one is due, or None: then it is a measurement's turn.

        Call it until it returns None, before each measurement.
        """
        if not self.is_due():
            self.count_measurement()
            return None
        return self.take(self._measure(self._configuration))
