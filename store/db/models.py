"""The tables, as typed models, with everything that must be true of them as constraints.

    graphs <- architecture_graphs                        what a network is made of
    step_profiles                                        what its training step does to memory
    configurations                                       the workload: what can be measured
    pools <- pool_members                                selections of it, by name
    devices                                              hardware under one software stack
    campaigns <- campaign_pool, rounds <- assignments    what is to be measured, why, and by whom
    assignments <- measurements (every attempt)          the record: what came out
    measurements <- labels <- assignment_labels          what is learned from
    canaries                                             whether a device is still itself
    campaigns <- snapshots, events                       what it published, what happened
    devices <- kernel_measurements                       see `kernel_models`

Names of columns carry units. Whatever changes here needs a migration too; a test compares the two.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    CheckConstraint,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    LargeBinary,
    String,
    Text,
    UniqueConstraint,
)
from sqlalchemy.orm import Mapped, mapped_column

from trappm.profiler.measuring.canary import CanaryDecision
from trappm.profiler.records import Outcome, Provenance
from trappm.store.db import kernel_models  # noqa: F401  # further tables
from trappm.store.db.column_types import BIG, JSON_, Base, UtcTime, positive, together
from trappm.store.records import AssignmentState, CampaignState, Purpose, Role, RoundState


class GraphRow(Base):
    """The graph template of one or more architectures."""

    __tablename__ = "graphs"

    content_hash: Mapped[str] = mapped_column(String(64), primary_key=True)
    template: Mapped[bytes] = mapped_column(LargeBinary)
    """As `GraphTemplate.to_bytes` gives it."""
    node_count: Mapped[int] = mapped_column(index=True)

    __table_args__ = positive("node_count")


class ArchitectureGraphRow(Base):
    """Which graph an architecture has at an input size, or why it has none."""

    __tablename__ = "architecture_graphs"

    architecture: Mapped[str] = mapped_column(String(200), primary_key=True)
    input_size: Mapped[int] = mapped_column(primary_key=True)
    graph_hash: Mapped[str | None] = mapped_column(ForeignKey("graphs.content_hash"), index=True)
    refusal: Mapped[str | None] = mapped_column(Text)

    __table_args__ = (
        CheckConstraint("(graph_hash IS NULL) <> (refusal IS NULL)", name="graph_or_refusal"),
    )


class StepProfileRow(Base):
    """What a training step of an architecture does to memory, or why that is not known.

    An architecture whose graph was refused has no row here.
    """

    __tablename__ = "step_profiles"

    architecture: Mapped[str] = mapped_column(String(200), primary_key=True)
    input_size: Mapped[int] = mapped_column(primary_key=True)
    profile: Mapped[bytes | None] = mapped_column(LargeBinary)
    """As `profiler.simulation.step_profile.StepProfile.to_bytes` gives it."""
    saved_bytes_constant: Mapped[int | None] = mapped_column(BIG)
    saved_bytes_per_sample: Mapped[int | None] = mapped_column(BIG)
    trainable_parameters: Mapped[int | None] = mapped_column(BIG)
    frozen_parameters: Mapped[int | None] = mapped_column(BIG)
    refusal: Mapped[str | None] = mapped_column(Text)
    trace_version: Mapped[int] = mapped_column(server_default="1")
    """`profiler.simulation.step_profile.TRACE_VERSION` of when it was made."""

    __table_args__ = (
        CheckConstraint("(profile IS NULL) <> (refusal IS NULL)", name="profile_or_refusal"),
        *(
            CheckConstraint(f"({column} IS NULL) = (profile IS NULL)", name=column)
            for column in (
                "saved_bytes_constant",
                "saved_bytes_per_sample",
                "trainable_parameters",
                "frozen_parameters",
            )
        ),
    )


class ConfigurationRow(Base):
    """A `Configuration`, stored once however often it is measured, and its family."""

    __tablename__ = "configurations"

    id: Mapped[str] = mapped_column(String(20), primary_key=True)
    architecture: Mapped[str] = mapped_column(String(200), index=True)
    family: Mapped[str] = mapped_column(String(64))
    batch_size: Mapped[int]
    input_size: Mapped[int]
    precision: Mapped[str] = mapped_column(String(16))
    memory_format: Mapped[str] = mapped_column(String(16))
    optimizer: Mapped[str] = mapped_column(String(16))
    phase: Mapped[str] = mapped_column(String(16))

    __table_args__ = (
        *positive("batch_size", "input_size"),
        # A family's labels in the order of a query, and without reading those of other sizes.
        Index(None, "family", "architecture", "batch_size", "input_size"),
    )


class NamedPoolRow(Base):
    """A pool under its name, with the spec that it was built from."""

    __tablename__ = "pools"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(64), unique=True)
    spec: Mapped[dict[str, Any]]
    built_at: Mapped[str] = mapped_column(UtcTime)


class PoolMemberRow(Base):
    """A configuration in a named pool."""

    __tablename__ = "pool_members"

    pool_id: Mapped[int] = mapped_column(ForeignKey("pools.id"), primary_key=True)
    configuration_id: Mapped[str] = mapped_column(ForeignKey("configurations.id"), primary_key=True)


class DeviceRow(Base):
    """Hardware under one software stack: the same key on another stack is another device."""

    __tablename__ = "devices"

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(String(64))
    fingerprint: Mapped[str] = mapped_column(String(64))
    environment: Mapped[dict[str, Any]]
    """The environment of its first measurement."""

    __table_args__ = (UniqueConstraint("key", "fingerprint"),)


class CampaignRow(Base):
    """A campaign, with the spec that it was launched from."""

    __tablename__ = "campaigns"

    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    name: Mapped[str] = mapped_column(String(200))
    spec: Mapped[dict[str, Any]]
    seed: Mapped[int] = mapped_column(BIG)
    state: Mapped[CampaignState]
    created_at: Mapped[str] = mapped_column(UtcTime)
    finished_at: Mapped[str | None] = mapped_column(UtcTime)
    owner_id: Mapped[str | None] = mapped_column(String(32))
    """Of the process that runs it, and alone may write for it; see `owners`."""
    owner_process: Mapped[dict[str, Any] | None] = mapped_column(JSON_)
    """A `records.OwnerProcess`."""
    owned_since: Mapped[str | None] = mapped_column(UtcTime)
    owner_seen_at: Mapped[str | None] = mapped_column(UtcTime)
    """Its last heartbeat, by the clock of the database."""

    __table_args__ = (
        CheckConstraint(
            "(finished_at IS NOT NULL) = (state IN ('finished', 'cancelled'))", name="finished_at"
        ),
        together("owner", "owner_id", "owner_process", "owned_since", "owner_seen_at"),
    )


class PoolRow(Base):
    """A configuration that a campaign may choose."""

    __tablename__ = "campaign_pool"

    campaign_id: Mapped[str] = mapped_column(ForeignKey("campaigns.id"), primary_key=True)
    configuration_id: Mapped[str] = mapped_column(ForeignKey("configurations.id"), primary_key=True)
    held_out: Mapped[bool]
    """Its architecture belongs to the evaluation set."""


class RoundRow(Base):
    """One acquisition and its measurements."""

    __tablename__ = "rounds"

    campaign_id: Mapped[str] = mapped_column(ForeignKey("campaigns.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    purpose: Mapped[Purpose]
    state: Mapped[RoundState]
    report: Mapped[dict[str, Any] | None] = mapped_column(JSON_)

    __table_args__ = (
        CheckConstraint("number >= 0", name="number"),
        CheckConstraint("(report IS NOT NULL) = (state = 'closed')", name="report"),
    )


class AssignmentRow(Base):
    """One configuration of a campaign to be measured on one device."""

    __tablename__ = "assignments"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    campaign_id: Mapped[str] = mapped_column(String(16))
    round_number: Mapped[int]
    configuration_id: Mapped[str] = mapped_column(String(20))
    device_key: Mapped[str] = mapped_column(String(64))
    role: Mapped[Role]
    rank: Mapped[int]
    reason: Mapped[dict[str, Any]]
    state: Mapped[AssignmentState] = mapped_column(default=AssignmentState.OPEN)
    attempts: Mapped[int] = mapped_column(default=0)
    failures: Mapped[int] = mapped_column(default=0)
    worker: Mapped[str | None] = mapped_column(String(200))

    __table_args__ = (
        ForeignKeyConstraint(
            ["campaign_id", "round_number"], ["rounds.campaign_id", "rounds.number"]
        ),
        ForeignKeyConstraint(
            ["campaign_id", "configuration_id"],
            ["campaign_pool.campaign_id", "campaign_pool.configuration_id"],
        ),
        UniqueConstraint("campaign_id", "configuration_id", "device_key"),
        CheckConstraint("(worker IS NOT NULL) = (state = 'leased')", name="worker"),
        CheckConstraint("failures BETWEEN 0 AND attempts", name="attempts"),
        Index(None, "campaign_id", "device_key", "state", "round_number", "rank"),
    )


class MeasurementRow(Base):
    """One attempt, however it ended."""

    __tablename__ = "measurements"

    id: Mapped[int] = mapped_column(BIG, primary_key=True)
    attempt_key: Mapped[str] = mapped_column(String(64), unique=True)
    configuration_id: Mapped[str] = mapped_column(ForeignKey("configurations.id"))
    device_id: Mapped[int] = mapped_column(ForeignKey("devices.id"))
    protocol_name: Mapped[str] = mapped_column(String(64))
    protocol: Mapped[dict[str, Any]]
    campaign_id: Mapped[str | None] = mapped_column(ForeignKey("campaigns.id"), index=True)
    assignment_id: Mapped[str | None] = mapped_column(ForeignKey("assignments.id"), index=True)
    provenance: Mapped[Provenance]
    outcome: Mapped[Outcome]
    failed_in: Mapped[str | None] = mapped_column(String(16))
    message: Mapped[str | None] = mapped_column(Text)
    started_at: Mapped[str] = mapped_column(UtcTime, index=True)
    duration_s: Mapped[float]
    step_samples_ms: Mapped[bytes] = mapped_column(LargeBinary)
    """Every timed step as little-endian float32: a fifth of the room of JSON."""
    step_median_ms: Mapped[float | None]
    step_mean_ms: Mapped[float | None]
    step_iqr_ms: Mapped[float | None]
    step_p95_ms: Mapped[float | None]
    step_forward_share: Mapped[float | None]
    step_backward_share: Mapped[float | None]
    step_optimizer_share: Mapped[float | None]
    memory_mib: Mapped[float | None]
    power_w: Mapped[float | None]
    energy_j: Mapped[float | None]
    memory_detail_mib: Mapped[dict[str, Any]]
    missing: Mapped[dict[str, Any]]
    environment: Mapped[dict[str, Any]]

    __table_args__ = (
        *positive("step_median_ms", "step_mean_ms", "step_p95_ms"),
        *positive("memory_mib", "power_w", "energy_j"),
        CheckConstraint("step_iqr_ms >= 0", name="step_iqr_ms"),
        together("step_summary", "step_median_ms", "step_mean_ms", "step_iqr_ms", "step_p95_ms"),
        CheckConstraint("duration_s >= 0", name="duration_s"),
        Index(None, "configuration_id", "device_id"),
        Index(None, "outcome", "id", unique=True),  # what labels refer to
    )


class LabelRow(Base):
    """What training uses: one for a configuration, device (with its stack) and protocol."""

    __tablename__ = "labels"

    id: Mapped[int] = mapped_column(BIG, primary_key=True)
    configuration_id: Mapped[str] = mapped_column(ForeignKey("configurations.id"))
    device_id: Mapped[int] = mapped_column(ForeignKey("devices.id"), index=True)
    protocol_name: Mapped[str] = mapped_column(String(64))
    measurement_id: Mapped[int] = mapped_column(BIG, unique=True)
    outcome: Mapped[Outcome]
    """Of its measurement: with it the label refers there, so none can stand on one that failed."""
    provenance: Mapped[Provenance]
    step_time_ms: Mapped[float | None]
    memory_mib: Mapped[float | None]
    memory_above_mib: Mapped[float | None]
    """Memory ran out: it needs at least so much. The label is censored then."""
    power_w: Mapped[float | None]
    energy_j: Mapped[float | None]
    created_at: Mapped[str] = mapped_column(UtcTime, index=True)

    __table_args__ = (
        ForeignKeyConstraint(
            ["measurement_id", "outcome"], ["measurements.id", "measurements.outcome"]
        ),
        UniqueConstraint("configuration_id", "device_id", "protocol_name"),
        *positive("step_time_ms", "memory_mib", "memory_above_mib", "power_w", "energy_j"),
        CheckConstraint(
            "step_time_ms IS NOT NULL OR memory_mib IS NOT NULL"
            " OR power_w IS NOT NULL OR memory_above_mib IS NOT NULL",
            name="some_metric",
        ),
        CheckConstraint("memory_mib IS NULL OR memory_above_mib IS NULL", name="value_or_bound"),
        CheckConstraint(
            "(outcome = 'ok' AND memory_above_mib IS NULL)"
            " OR (outcome = 'oom' AND memory_above_mib IS NOT NULL)",
            name="ok_or_censored",
        ),
    )


class AssignmentLabelRow(Base):
    """The label that an assignment ended with: from its own measurement or from an earlier one."""

    __tablename__ = "assignment_labels"

    assignment_id: Mapped[str] = mapped_column(ForeignKey("assignments.id"), primary_key=True)
    label_id: Mapped[int] = mapped_column(ForeignKey("labels.id"), index=True)


class CanaryRow(Base):
    """One reading of the canary: a `profiler.measuring.canary.CanaryReading`."""

    __tablename__ = "canaries"

    id: Mapped[int] = mapped_column(BIG, primary_key=True)
    attempt_key: Mapped[str] = mapped_column(String(64), unique=True)
    taken_at: Mapped[str] = mapped_column(UtcTime)
    host: Mapped[str] = mapped_column(String(255))
    device: Mapped[str] = mapped_column(String(64))
    """Its key: a device may have readings before it has a measurement, and so a row."""
    stack_fingerprint: Mapped[str] = mapped_column(String(64))
    configuration_id: Mapped[str] = mapped_column(ForeignKey("configurations.id"))
    protocol: Mapped[str] = mapped_column(String(64))
    campaign_id: Mapped[str | None] = mapped_column(ForeignKey("campaigns.id"), index=True)
    outcome: Mapped[Outcome]
    step_time_ms: Mapped[float | None]
    memory_mib: Mapped[float | None]
    power_w: Mapped[float | None]
    reference_ms: Mapped[float | None]
    relative_drift: Mapped[float | None]
    decision: Mapped[CanaryDecision]
    message: Mapped[str | None] = mapped_column(Text)

    __table_args__ = (
        *positive("step_time_ms", "memory_mib", "power_w", "reference_ms"),
        CheckConstraint("step_time_ms IS NULL OR outcome = 'ok'", name="step_time"),
        CheckConstraint("(message IS NULL) = (decision = 'ok')", name="message"),
        Index(None, "device", "stack_fingerprint", "host", "taken_at"),
    )


class SnapshotRow(Base):
    """A published snapshot; the files stand in the data folder."""

    __tablename__ = "snapshots"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    campaign_id: Mapped[str | None] = mapped_column(ForeignKey("campaigns.id"), index=True)
    location: Mapped[str] = mapped_column(String(1000))
    manifest: Mapped[dict[str, Any]]
    created_at: Mapped[str] = mapped_column(UtcTime)


class EventRow(Base):
    """Something that happened to a campaign."""

    __tablename__ = "events"

    id: Mapped[int] = mapped_column(BIG, primary_key=True)
    campaign_id: Mapped[str] = mapped_column(ForeignKey("campaigns.id"), index=True)
    at: Mapped[str] = mapped_column(UtcTime)
    kind: Mapped[str] = mapped_column(String(64))
    message: Mapped[dict[str, Any]]


METADATA = Base.metadata  # all of these tables
