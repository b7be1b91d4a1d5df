"""Recorded labels as a device: `replay:FILE` runs nothing.

The file has JSON lines, each a measurement (`trappm measure --json` or `Measurement.to_dict`) or a
label: `architecture`, `batch_size`, `input_size`, other fields of a `Configuration`, and any of
`step_time_ms`, `memory_mib`, `power_w`, `energy_j`, `provenance`. Other configurations are
`unsupported`. Results keep the provenance and the environment of their record. All records must be
of one stack.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from trappm.profiler.devices.base import Device
from trappm.profiler.errors import DeviceError, InputError, UnsupportedModelError
from trappm.profiler.host.environment import stack_difference
from trappm.profiler.records import Configuration, Measurement, Outcome, Protocol, Provenance
from trappm.profiler.steps.meter import Findings
from trappm.profiler.steps.sampling import summarize

_MAX_BYTES = 512 << 20
_CONFIGURATION = [f.name for f in dataclasses.fields(Configuration)]
_METRICS = ("step_time_ms", "memory_mib", "power_w", "energy_j")
_UNTOLD = "not in the recorded label"


class ReplayDevice(Device):
    """A file of measurements or labels; needs no lock."""

    lock_name = None
    provenance = Provenance.IMPORTED  # of what it does not know: no measurement of this machine

    def __init__(self, key: str) -> None:
        super().__init__(key)
        name = key.partition(":")[2]
        path = Path(name)
        if not name or not path.is_file():
            raise DeviceError(f"there is no file {name!r}; write replay:FILE with JSON lines")
        if path.stat().st_size > _MAX_BYTES:
            raise DeviceError(f"{name!r} is larger than {_MAX_BYTES >> 20} MiB; split it")
        self._path = path.resolve()
        self._answers  # noqa: B018  # a file that cannot be read fails now

    def environment(self) -> dict[str, Any]:
        """Return the facts that all records share, for the fingerprint of failures."""
        first, *others = [answer.environment for answer in self._answers.values()]
        shared = {k: v for k, v in first.items() if all(o.get(k) == v for o in others)}
        return {"device": self.key, **shared, "replayed_from": self._path.name}

    @property
    def capacity_mib(self) -> float:
        """Largest recorded capacity; it limits nothing here."""
        answers = self._answers.values()
        return max((f.memory_detail_mib.get("capacity", 0.0) for f in answers), default=0.0)

    def measure(
        self, configuration: Configuration, protocol: Protocol, enter: Callable[[str], None]
    ) -> Findings:
        del protocol  # a record has its own, which its environment names
        enter("measure")
        try:
            return self._answers[configuration]
        except KeyError as error:
            raise UnsupportedModelError(
                f"{self._path.name} has no record of {configuration}"
            ) from error

    @property
    def _answers(self) -> Mapping[Configuration, Findings]:
        stat = self._path.stat()
        return _read(self._path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=4)
def _read(path: Path, *_version: int) -> Mapping[Configuration, Findings]:
    """Return the findings of each configuration: its first `ok` record, or else its first."""
    answers: dict[Configuration, Findings] = {}
    first: Mapping[str, Any] = {}
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise InputError("it is not a JSON object")
                configuration, findings = _whole(record) if "step" in record else _label(record)
            except (InputError, TypeError, ValueError, KeyError, RecursionError) as error:
                raise DeviceError(
                    f"line {number} of {path.name} is neither a measurement nor a label: {error!r}"
                ) from error
            first = first or findings.environment
            difference = _difference(findings.environment, first)
            if difference is not None:
                raise DeviceError(
                    f"line {number} of {path.name} was measured on another stack than what is "
                    f"before it ({difference}); split the file"
                )
            known = answers.setdefault(configuration, findings)
            if known.outcome is not Outcome.OK and findings.outcome is Outcome.OK:
                answers[configuration] = findings
    if not answers:
        raise DeviceError(f"{path.name} has no records")
    return answers


def _difference(other: Mapping[str, Any], first: Mapping[str, Any]) -> str | None:
    """Return the difference of two records' stacks, of the facts that both have."""
    both = [n for n in other if other[n] is not None and first.get(n) is not None]
    return stack_difference({n: other[n] for n in both}, {n: first[n] for n in both})


def _whole(record: Mapping[str, Any]) -> tuple[Configuration, Findings]:
    measurement = Measurement.from_dict(record)
    for name in _METRICS:
        _positive(name, getattr(measurement, name))
    for sample_ms in measurement.step_samples_ms:
        _positive("a step sample", sample_ms)
    fields = {f.name: getattr(measurement, f.name) for f in dataclasses.fields(Findings)}
    fields["environment"] = {
        **measurement.environment,
        "replayed_attempt": measurement.attempt_key,
        "replayed_protocol": measurement.protocol.name,
    }
    return measurement.configuration, Findings(**fields)


def _label(record: Mapping[str, Any]) -> tuple[Configuration, Findings]:
    """Read a label, which has no samples except its step time."""
    configuration = Configuration(**{k: v for k, v in record.items() if k in _CONFIGURATION})
    values = {name: _positive(name, record.get(name)) for name in _METRICS}
    if all(value is None for value in values.values()):
        raise InputError(f"it has none of {', '.join(_METRICS)}")
    time_ms = values["step_time_ms"]
    samples_ms = () if time_ms is None else (time_ms,)
    missing = dict.fromkeys((k for k in _METRICS if record.get(k) is None), _UNTOLD)
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]
    return configuration, Findings(
        outcome=Outcome.OK,
        step_samples_ms=samples_ms,
        step=summarize(samples_ms) if samples_ms else None,
        missing=missing,
        environment={"device_name": record.get("device"), "replayed_label": digest},
        provenance=Provenance(record.get("provenance", Provenance.IMPORTED)),
        memory_mib=values["memory_mib"],
        power_w=values["power_w"],
        energy_j=values["energy_j"],
    )


def _positive(name: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        raise InputError(f"{name} is {value!r}; it must be a number above 0")
    return float(value)
