"""The tables of kernel measurements: what was timed to know a device, kept beside labels.

    devices <- kernel_measurements (every attempt) -> kernel_conditions (one a run)

A run of hundreds of kernels has one protocol and one environment, so these stand apart.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, Index, LargeBinary, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from trappm.profiler.records import Outcome, Provenance
from trappm.store.db.column_types import BIG, Base, UtcTime, positive


class KernelConditionsRow(Base):
    """How the kernels of a run were timed, and where."""

    __tablename__ = "kernel_conditions"

    content_hash: Mapped[str] = mapped_column(String(64), primary_key=True)
    protocol: Mapped[dict[str, Any]]
    environment: Mapped[dict[str, Any]]


class KernelMeasurementRow(Base):
    """A `profiler.kernels.kernel_measurement.KernelMeasurement`."""

    __tablename__ = "kernel_measurements"

    id: Mapped[int] = mapped_column(BIG, primary_key=True)
    attempt_key: Mapped[str] = mapped_column(String(64), unique=True)
    device_id: Mapped[int] = mapped_column(ForeignKey("devices.id"))
    conditions_hash: Mapped[str] = mapped_column(
        ForeignKey("kernel_conditions.content_hash"), index=True
    )
    call: Mapped[str] = mapped_column(String(300), index=True)
    """The text of its `KernelCall`: operator, sizes by name, and the columns that follow."""
    operator: Mapped[str] = mapped_column(String(32))
    data_type: Mapped[str] = mapped_column(String(8))
    memory_format: Mapped[str] = mapped_column(String(16))
    direction: Mapped[str] = mapped_column(String(16))
    tf32: Mapped[bool]
    provenance: Mapped[Provenance]
    outcome: Mapped[Outcome]
    failed_in: Mapped[str | None] = mapped_column(String(16))
    message: Mapped[str | None] = mapped_column(Text)
    started_at: Mapped[str] = mapped_column(UtcTime)
    duration_s: Mapped[float]
    samples_ms: Mapped[bytes] = mapped_column(LargeBinary)
    """Little-endian float32."""
    time_ms: Mapped[float | None]
    iqr_ms: Mapped[float | None]
    power_w: Mapped[float | None]
    energy_j: Mapped[float | None]
    missing: Mapped[dict[str, Any]]
    facts: Mapped[dict[str, Any]]

    __table_args__ = (
        *positive("time_ms", "power_w", "energy_j"),
        CheckConstraint("iqr_ms >= 0", name="iqr_ms"),
        CheckConstraint("duration_s >= 0", name="duration_s"),
        CheckConstraint("outcome <> 'ok' OR time_ms IS NOT NULL", name="ok_has_a_time"),
        Index(None, "device_id", "operator", "outcome"),
    )
