"""One kernel call measured on one device, as a step's `Measurement`.

The time of a call includes its launch: a kernel shorter than its launch takes as long as the
launch.
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
    """Result of timing a kernel call repeatedly."""

    call: KernelCall
    device: str
    """Key of the device, such as `cpu-2t` or `a100`."""
    outcome: Outcome
    protocol: Protocol
    """One step is one call."""
    started_at: str
    """UTC, ISO 8601."""
    duration_s: float
    """Wall time, including the creation of tensors."""
    attempt_key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Name of this attempt; recording it twice has no effect."""
    provenance: Provenance = Provenance.MEASURED
    samples_ms: tuple[float, ...] = ()
    time_ms: float | None = None
    """Median, or the value of a source without samples."""
    iqr_ms: float | None = None
    power_w: float | None = None
    """Mean over the window, idle power included."""
    energy_j: float | None = None
    """Energy of one call."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Reason for each metric that is None."""
    failed_in: str | None = None
    """For outcomes other than ok: `create`, `warmup`, `measure` or `worker`."""
    message: str | None = None
    """For outcomes other than ok: what happened."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Observations during this call: clocks, lost processor time, the meter."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Facts of all calls of a run: hardware, software, preparation."""

    def __post_init__(self) -> None:
        for name, kind in (("outcome", Outcome), ("provenance", Provenance)):
            object.__setattr__(self, name, member(name, kind, getattr(self, name)))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; `from_dict` is the inverse."""
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
        """Return the measurement of `to_dict`.

        Raises:
            InputError: Unknown call, outcome or protocol.
        """
        return cls(
            **{
                **data,
                "call": KernelCall.from_text(data["call"]),
                "protocol": Protocol(**data["protocol"]),
                "samples_ms": tuple(data["samples_ms"]),
            }
        )
