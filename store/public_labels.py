"""Labels without what tells machines or people: they can be sent in and shown.

What stays is listed here, so a fact that is added later is left out. These are the configuration,
the device's name, versions of software, settings, figures and how reliable they are. A label of a
model that others cannot build is left out as a whole.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from trappm.profiler.host.environment import stack_facts
from trappm.profiler.models.known_names import has_public_name
from trappm.profiler.records import Measurement, Outcome, Provenance
from trappm.profiler.records.step_scope import KEY
from trappm.store.files import fingerprint_of, row_of

UNKNOWN_TIME = "1970-01-01T00:00:00+00:00"
"""Start of a measurement that has no time; it is also listed in `Measurement.missing`."""
NOT_TOLD = "not in a public file"
_FACTS = (
    KEY, "device_memory_mib", "memory_method", "world_size", "threads", "steps_in_window",
    "steps_rejected", "step_time_relative_error", "process_medians_ms", "lost_cpu_share",
    "clock_event_reasons", "foreign_gpu_processes", "sm_clock_mhz",
)  # fmt: skip
"""Facts of an environment in addition to those of the stack: settings and reliability."""
_PLAIN = re.compile(r"[\w.:,=-]*")
"""Values of environment variables that are not paths."""


def public_label(measurement: Measurement) -> Measurement | None:
    """Return a measurement as others may see it; None if its model is not public.

    The result is `imported`, and its attempt key is a hash of itself. Applied to a result, this
    returns an equal one.
    """
    what = measurement.configuration
    if measurement.outcome not in {Outcome.OK, Outcome.OOM}:
        return None
    if not has_public_name(what.architecture):
        return None
    given = measurement.environment
    environment = stack_facts(given) | {name: given[name] for name in _FACTS if name in given}
    switches: Mapping[str, Any] = environment.pop("switches", {})
    plain = {name: text for name, text in switches.items() if _PLAIN.fullmatch(str(text))}
    if plain:
        environment["switches"] = plain
    shown = replace(
        measurement,
        started_at=UNKNOWN_TIME,
        duration_s=0.0,
        attempt_key="",
        provenance=Provenance.IMPORTED,
        missing=dict.fromkeys((*measurement.missing, "started_at", "duration_s"), NOT_TOLD),
        message=None,
        environment=environment,
    )
    row = row_of(shown) | {"fingerprint": fingerprint_of(environment)}
    text = json.dumps(row, sort_keys=True)
    return replace(shown, attempt_key=hashlib.sha256(text.encode()).hexdigest()[:32])


def public_labels(measurements: Iterable[Measurement]) -> Iterator[Measurement]:
    """Yield those that TraPPM measured and that are public, each as `public_label`."""
    for measurement in measurements:
        if measurement.provenance is Provenance.MEASURED:
            shown = public_label(measurement)
            if shown is not None:
                yield shown
