"""One kernel call on one device: samples, energy, environment, outcome; as a step's `Measurement`.

The time of a call includes its launch. On a device whose kernels run beside the host, one that is
shorter than its launch takes as long as the host needs to launch it.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from trappm.profiler.kernels.kernel_call import KernelCall
from trappm.profiler.records import Outcome, Protocol, Provenance, member


@dataclass(frozen=True, kw_only=True)
class KernelMeasurement:
    """What came of timing a kernel call again and again."""

    call: KernelCall
    device: str
    """The device's key, such as `cpu-2t` or `a100`."""
    outcome: Outcome
    protocol: Protocol
    """One step of it is one call."""
    started_at: str
    """UTC, ISO 8601."""
    duration_s: float
    """Wall time, making the tensors included."""
    attempt_key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Names this attempt; recording the same key twice records it once."""
    provenance: Provenance = Provenance.MEASURED
    samples_ms: tuple[float, ...] = ()
    time_ms: float | None = None
    """The median, or what a source tells that has no samples."""
    iqr_ms: float | None = None
    power_w: float | None = None
    """Mean over the window, with what the device draws when it is idle."""
    energy_j: float | None = None
    """Of one call."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """For each metric that is None: why."""
    failed_in: str | None = None
    """For outcomes other than ok: `create`, `warmup`, `measure` or `worker`."""
    message: str | None = None
    """For outcomes other than ok: what happened."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What was observed while this call was timed: clocks, lost processor time, the meter."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """What holds for all calls of a run: hardware, software, how the process was prepared."""

    def __post_init__(self) -> None:
        for name, kind in (("outcome", Outcome), ("provenance", Provenance)):
            object.__setattr__(self, name, member(name, kind, getattr(self, name)))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` is its inverse."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {
            **values,
            "call": self.call.text,
            "outcome": self.outcome.value,
            "protocol": self.protocol.to_dict(),
            "provenance": self.provenance.value,
            "samples_ms": list(self.samples_ms),
            "missing": dict(self.missing),
            "facts": dict(self.facts),
            "environment": dict(self.environment),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The measurement that `to_dict` gave.

        Raises:
            InputError: a call, outcome or protocol that there is not.
        """
        return cls(
            **{
                **data,
                "call": KernelCall.from_text(data["call"]),
                "protocol": Protocol(**data["protocol"]),
                "samples_ms": tuple(data["samples_ms"]),
            }
        )
