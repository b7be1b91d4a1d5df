"""Measures a list of configurations into a file of JSON lines.

The result file is the only state: a sweep continues after its last complete line. Unstable runs,
broken workers and hosts short of memory are tried again a limited number of times, after all
others.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trappm.profiler.errors import InputError, TrappmError, one_line
from trappm.profiler.files.json_lines import JsonLines
from trappm.profiler.files.untrusted import load_yaml, read_plain
from trappm.profiler.host.environment import stack_difference
from trappm.profiler.measuring.attempt import WORKER, others_had_memory
from trappm.profiler.models.pool import PoolGroup, PoolSpec, build_pool
from trappm.profiler.records import Configuration, Measurement, Outcome, Protocol

MAX_WORKER_FAILURES = 3
"""Number of successive failures after which the machine counts as unable to measure."""


class Sweep:
    """A list of configurations on one device, and their results.

    Args:
        configurations: Configurations to measure.
        results: File of all results.
        device_key: Device of this machine.
        protocol: How to measure.
        environment: Environment of the device (`Device.environment`).
        retries: Number of retries after failures that may pass.

    Raises:
        InputError: The results are of another software stack or device.
    """

    def __init__(
        self,
        configurations: Sequence[Configuration],
        results: JsonLines[Measurement],
        device_key: str,
        protocol: Protocol,
        environment: Mapping[str, Any],
        *,
        retries: int = 2,
    ) -> None:
        self._results = results
        self._retries = retries
        self._latest: dict[Configuration, Measurement] = {}
        self._tries: Counter[Configuration] = Counter()
        self.configurations = tuple(dict.fromkeys(configurations))
        wanted = set(self.configurations)
        for measurement in results.earlier:
            is_same = (measurement.device, measurement.protocol) == (device_key, protocol)
            if measurement.configuration in wanted and is_same:
                # How memory is counted is known only to who has a context on the GPU.
                method = {"memory_method": measurement.environment.get("memory_method")}
                difference = stack_difference(measurement.environment, method | dict(environment))
                # A worker that broke down early has not come to say where it was.
                if difference is not None and not worker_failed(measurement):
                    raise InputError(
                        f"the results so far are of another stack ({difference}); name another "
                        "file for those of this one"
                    )
                self._take(measurement)

    @property
    def settled(self) -> int:
        """Number of configurations with a final outcome."""
        return sum(map(self._is_settled, self.configurations))

    @property
    def measured(self) -> int:
        """Number of configurations with the outcome `ok`."""
        return self.outcomes[Outcome.OK]

    @property
    def outcomes(self) -> Counter[Outcome]:
        """Number of configurations by the outcome of their latest attempt."""
        return Counter(measurement.outcome for measurement in self._latest.values())

    @property
    def attempts(self) -> int:
        """Number of measurements of this sweep in the file."""
        return self._tries.total()

    def run(
        self, measure: Callable[[Configuration], Measurement], tell: Callable[[str], None]
    ) -> None:
        """Measure the remaining configurations; report a line after each attempt.

        Raises:
            TrappmError: A result cannot be written, or the worker failed several times in
                succession.
        """
        waiting = deque(c for c in self.configurations if not self._is_settled(c))
        begin, attempts, failures = time.monotonic(), 0, 0
        while waiting:
            configuration = waiting.popleft()
            measurement = measure(configuration)
            self._results.append(measurement)
            self._take(measurement)
            if not self._is_settled(configuration):
                waiting.append(configuration)
            attempts += 1
            each_s = (time.monotonic() - begin) / attempts
            tell(self._progress(measurement, each_s * len(waiting)))
            failures = failures + 1 if worker_failed(measurement) else 0
            if waiting and failures == MAX_WORKER_FAILURES:
                raise TrappmError(
                    f"the worker broke down {failures} times in succession, lastly with: "
                    f"{measurement.message}"
                )

    def _take(self, measurement: Measurement) -> None:
        configuration = measurement.configuration
        self._tries[configuration] += 1
        known = self._latest.get(configuration)
        if known is None or known.outcome is not Outcome.OK:
            self._latest[configuration] = measurement

    def _is_settled(self, configuration: Configuration) -> bool:
        latest = self._latest.get(configuration)
        return latest is not None and (
            not may_pass(latest) or self._tries[configuration] > self._retries
        )

    def _progress(self, measurement: Measurement, left_s: float) -> str:
        text = str(measurement.outcome)
        if measurement.step_time_ms is not None:
            text += f", {measurement.step_time_ms:.2f} ms"
        if measurement.memory_mib is not None:
            text += f", {measurement.memory_mib:.0f} MiB"
        if measurement.message is not None:
            text += f" in {measurement.failed_in}: {measurement.message}"
        if not self._is_settled(measurement.configuration):
            text += " (to be tried again)"
        rest = f"; about {duration(left_s)} left" if left_s > 0 else ""
        count = f"[{self.settled}/{len(self.configurations)}]"
        return f"{count} {measurement.configuration}: {text}{rest}"


def may_pass(measurement: Measurement) -> bool:
    """Return whether a measurement failed for a temporary reason."""
    return (
        measurement.outcome is Outcome.UNSTABLE
        or worker_failed(measurement)
        or (measurement.outcome is Outcome.OOM and others_had_memory(measurement.memory_detail_mib))
    )


def duration(seconds: float) -> str:
    """Return a duration in suitable units, such as `3 min` or `2 h 10 min`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def worker_failed(measurement: Measurement) -> bool:
    """Return whether a measurement failed before its configuration had a part in it."""
    return measurement.outcome is Outcome.ERROR and measurement.failed_in == WORKER


_MAX_BYTES = 64 << 20
_DOCUMENTS = {".yaml", ".yml", ".json"}


def read_configurations(path: Path) -> list[Configuration]:
    """Return the configurations of a list, each once, in its order.

    Raises:
        InputError: The file cannot be read or is empty, or an entry is wrong (named by its number).
    """
    configurations: dict[Configuration, None] = {}
    entries = _document(path) if path.suffix.lower() in _DOCUMENTS else _lines(path)
    for where, entry in entries:
        try:
            configurations.update(dict.fromkeys(_configurations(entry)))
        except InputError as error:
            raise InputError(f"{where} of {path}: {error}") from error
    if not configurations:
        raise InputError(f"{path} lists no configurations")
    return list(configurations)


def _configurations(entry: object) -> list[Configuration]:
    if not isinstance(entry, dict) or not all(isinstance(key, str) for key in entry):
        raise InputError(f"{str(entry)[:80]!r} is neither a configuration nor a group")
    if "architecture" not in entry:
        values = {name: _values(name, value) for name, value in entry.items()}
        return build_pool(PoolSpec(groups=(PoolGroup(**_fields(PoolGroup, values)),)))
    if not isinstance(entry["architecture"], str):
        raise InputError(f"architecture is {entry['architecture']!r}; it must be a name")
    return [Configuration(**_fields(Configuration, entry))]


def _fields(kind: type[Configuration | PoolGroup], entry: dict[str, Any]) -> dict[str, Any]:
    """Check that an entry has all needed keys and no unknown ones."""
    known = {field.name: field.default for field in dataclasses.fields(kind)}
    unknown = [name for name in entry if name not in known]
    if unknown:
        raise InputError(f"unknown key {unknown[0]!r}; expected one of: {', '.join(known)}")
    for name, default in known.items():
        if default is dataclasses.MISSING and name not in entry:
            raise InputError(f"{name} is missing")
    return entry


def _values(name: str, values: object) -> tuple[Any, ...]:
    kinds = (str,) if name in {"architectures", "families"} else (str, int)
    if not isinstance(values, list) or not all(isinstance(value, kinds) for value in values):
        raise InputError(f"{name} is {str(values)[:80]!r}; a group has lists of names or numbers")
    return tuple(values)


def _document(path: Path) -> Iterator[tuple[str, object]]:
    document = load_yaml(_text(path), str(path))
    if isinstance(document, dict) and [*document] == ["groups"]:
        document = document["groups"]
    if not isinstance(document, list):
        raise InputError(f"{path} has no list of configurations, nor `groups` with a list")
    for number, entry in enumerate(document, 1):
        yield f"entry {number}", entry


def _lines(path: Path) -> Iterator[tuple[str, object]]:
    for number, line in enumerate(_text(path).splitlines(), 1):
        if line.strip():
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(
                    f"line {number} of {path} is not JSON: {one_line(error)}"
                ) from error
            yield f"line {number}", entry


def _text(path: Path) -> str:
    try:
        return read_plain(path, _MAX_BYTES).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read the list {path}: it is not UTF-8") from error
