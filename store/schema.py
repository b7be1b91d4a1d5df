"""The tables as typed models, with their constraints.

    graphs <- traces                                     steps of models, a cache
    configurations                                       workloads
    pool_members                                         named selections of configurations
    devices                                              hardware under one software stack
    campaigns <- campaign_pool, rounds <- assignments    what to measure
    assignments <- measurements (every attempt)          results
    measurements <- labels <- assignment_labels          accepted results, for training
    canaries                                             repeated readings of one step
    campaigns <- events                                  log

Times, JSON, enumerations and large numbers are stored in the same way on both back ends. Names of
columns carry units. A change here needs another SCHEMA and its revision in `migrations/versions`.
"""

from __future__ import annotations

import enum
from datetime import UTC, datetime
from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    Dialect,
    Enum,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from trappm.profiler.measuring.canary import CanaryDecision
from trappm.profiler.records import Outcome, Provenance
from trappm.store.records import AssignmentState, CampaignState, Purpose, Role


class UtcTime(TypeDecorator[str]):
    """Timestamp in the database, ISO 8601 string in UTC in Python."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        time = datetime.fromisoformat(value)
        if time.tzinfo is None:
            raise ValueError(f"the time {value!r} has no time zone; give it in UTC")
        return time.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> str | None:
        if value is None:
            return None
        time = value.replace(tzinfo=UTC) if value.tzinfo is None else value  # SQLite keeps no zone
        return time.astimezone(UTC).isoformat()


def _enum(kind: type[enum.Enum]) -> Enum:
    """Return a text column with a CHECK, which a small migration can extend."""
    return Enum(
        kind,
        native_enum=False,
        create_constraint=True,
        length=16,
        values_callable=lambda members: [member.value for member in members],
    )


JSON_ = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
BIG = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers rows only by INTEGER

_ENUMS = (
    Outcome, Provenance, CampaignState, Purpose, AssignmentState, Role, CanaryDecision,
)  # fmt: skip


class Base(DeclarativeBase):
    """Root of the models."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar = {dict[str, Any]: JSON_} | {e: _enum(e) for e in _ENUMS}


def together(name: str, first: str, *others: str) -> CheckConstraint:
    """Return a constraint: all of these columns are NULL, or none of them is."""
    rule = " AND ".join(f"({first} IS NULL) = ({other} IS NULL)" for other in others)
    return CheckConstraint(rule, name=name)


def positive(*columns: str) -> tuple[CheckConstraint, ...]:
    """Return a constraint per column: its values are above 0; a missing value is NULL."""
    return tuple(CheckConstraint(f"{column} > 0", name=f"{column}_positive") for column in columns)


class GraphRow(Base):
    """The graph template of one or more architectures."""

    __tablename__ = "graphs"

    content_hash: Mapped[str] = mapped_column(String(64), primary_key=True)
    template: Mapped[bytes] = mapped_column(LargeBinary)
    """Bytes of `GraphTemplate.to_bytes`."""
    node_count: Mapped[int] = mapped_column(index=True)

    __table_args__ = positive("node_count")


class TraceRow(Base):
    """A traced step, or why there is none; it only saves time."""

    __tablename__ = "traces"

    digest: Mapped[str] = mapped_column(String(32), primary_key=True)
    """`TraceKey.digest`, which depends on the versions of libraries."""
    architecture: Mapped[str] = mapped_column(String(200), index=True)
    input_size: Mapped[int | None]
    precision: Mapped[str] = mapped_column(String(16))
    memory_format: Mapped[str] = mapped_column(String(16))
    execution: Mapped[str] = mapped_column(String(16))
    fused_attention: Mapped[bool]
    phase: Mapped[str] = mapped_column(String(16))
    graph_hash: Mapped[str | None] = mapped_column(ForeignKey("graphs.content_hash"), index=True)
    refusal: Mapped[str | None] = mapped_column(Text)
    """Why there is no step, or no graph, allocations and kernels of it."""
    data: Mapped[bytes | None] = mapped_column(LargeBinary)
    """Bytes of `profiler.traced_step.Trace.to_bytes` without the graph; NULL if refused."""
    size: Mapped[int]
    """Bytes of the data."""
    created_at: Mapped[str] = mapped_column(UtcTime)

    __table_args__ = (
        CheckConstraint("data IS NOT NULL OR refusal IS NOT NULL", name="step_or_refusal"),
        CheckConstraint("data IS NOT NULL OR graph_hash IS NULL", name="graph_of_step"),
        Index(None, "created_at", "size"),
    )


class ConfigurationRow(Base):
    """A `Configuration` and its family; stored once, however often it is measured."""

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
    execution: Mapped[str] = mapped_column(String(16))

    __table_args__ = (
        *positive("batch_size", "input_size"),
        # A family's labels in the order of a query.
        Index(None, "family", "architecture", "batch_size", "input_size"),
    )


class PoolMemberRow(Base):
    """A configuration in a named pool."""

    __tablename__ = "pool_members"

    pool: Mapped[str] = mapped_column(String(64), primary_key=True)
    configuration_id: Mapped[str] = mapped_column(ForeignKey("configurations.id"), primary_key=True)


class DeviceRow(Base):
    """Hardware under one software stack; the same key on another stack is another device."""

    __tablename__ = "devices"

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(String(64))
    fingerprint: Mapped[str] = mapped_column(String(64))
    environment: Mapped[dict[str, Any]]
    """Environment of its first measurement."""

    __table_args__ = (UniqueConstraint("key", "fingerprint"),)


class CampaignRow(Base):
    """A campaign and the spec that it was launched from."""

    __tablename__ = "campaigns"

    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    name: Mapped[str] = mapped_column(String(200))
    spec: Mapped[dict[str, Any]]
    seed: Mapped[int] = mapped_column(BIG)
    state: Mapped[CampaignState]
    created_at: Mapped[str] = mapped_column(UtcTime)
    finished_at: Mapped[str | None] = mapped_column(UtcTime)
    snapshot: Mapped[str | None] = mapped_column(String(64))
    """Id of its published snapshot, whose files are in the registry."""
    activity: Mapped[dict[str, Any] | None] = mapped_column(JSON_)
    """A `records.Activity` of its owner; NULL without one."""
    owner_id: Mapped[str | None] = mapped_column(String(32))
    """Id of the process that runs it and alone may write for it; see `owners`."""
    owner_process: Mapped[dict[str, Any] | None] = mapped_column(JSON_)
    """A `records.OwnerProcess`: its host and id."""
    owned_since: Mapped[str | None] = mapped_column(UtcTime)
    owner_seen_at: Mapped[str | None] = mapped_column(UtcTime)
    """Last heartbeat, by the clock of the database."""

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
    """True if its architecture belongs to the evaluation set."""


class RoundRow(Base):
    """A round of a campaign: one acquisition and its measurements."""

    __tablename__ = "rounds"

    campaign_id: Mapped[str] = mapped_column(ForeignKey("campaigns.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    purpose: Mapped[Purpose]
    planned: Mapped[dict[str, Any]] = mapped_column(default=dict)
    """Number of assignments by device key, for the devices whose part is planned."""
    report: Mapped[dict[str, Any] | None] = mapped_column(JSON_)
    """Report of its end; NULL while it is open."""

    __table_args__ = (CheckConstraint("number >= 0", name="number"),)


class AssignmentRow(Base):
    """A configuration of a campaign to be measured on a device."""

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
    losses: Mapped[int] = mapped_column(default=0)
    worker: Mapped[str | None] = mapped_column(String(200))
    host: Mapped[str | None] = mapped_column(String(255))
    """Node of the worker."""

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
        CheckConstraint("(host IS NOT NULL) = (worker IS NOT NULL)", name="host"),
        CheckConstraint("failures >= 0 AND losses >= 0", name="counts"),
        CheckConstraint("failures + losses <= attempts", name="attempts"),
        Index(None, "campaign_id", "state", "device_key"),
    )


class FailedHostRow(Base):
    """A node on which an assignment failed; others are tried first."""

    __tablename__ = "failed_hosts"

    assignment_id: Mapped[str] = mapped_column(ForeignKey("assignments.id"), primary_key=True)
    host: Mapped[str] = mapped_column(String(255), primary_key=True)


class MeasurementRow(Base):
    """One attempt with any outcome."""

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
    """Every timed step as little-endian float32; JSON takes five times the space."""
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
        # Sums of a campaign's attempts, which are read after each record.
        Index(None, "campaign_id", "device_id", "duration_s"),
        Index(None, "outcome", "id", unique=True),  # target of the foreign key of labels
    )


class LabelRow(Base):
    """Accepted result of a configuration on a device (with its stack) under a protocol."""

    __tablename__ = "labels"

    id: Mapped[int] = mapped_column(BIG, primary_key=True)
    configuration_id: Mapped[str] = mapped_column(ForeignKey("configurations.id"))
    device_id: Mapped[int] = mapped_column(ForeignKey("devices.id"), index=True)
    protocol_name: Mapped[str] = mapped_column(String(64))
    measurement_id: Mapped[int] = mapped_column(BIG, unique=True)
    outcome: Mapped[Outcome]
    """Outcome of its measurement; part of the foreign key, so a failed attempt has no label."""
    provenance: Mapped[Provenance]
    step_time_ms: Mapped[float | None]
    memory_mib: Mapped[float | None]
    memory_above_mib: Mapped[float | None]
    """Lower bound if memory ran out (a censored label)."""
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
    """Label of an assignment, from its own measurement or from an earlier one."""

    __tablename__ = "assignment_labels"

    assignment_id: Mapped[str] = mapped_column(ForeignKey("assignments.id"), primary_key=True)
    label_id: Mapped[int] = mapped_column(ForeignKey("labels.id"), index=True)


class CanaryRow(Base):
    """A `profiler.measuring.canary.CanaryReading`."""

    __tablename__ = "canaries"

    id: Mapped[int] = mapped_column(BIG, primary_key=True)
    attempt_key: Mapped[str] = mapped_column(String(64), unique=True)
    taken_at: Mapped[str] = mapped_column(UtcTime)
    host: Mapped[str] = mapped_column(String(255))
    device: Mapped[str] = mapped_column(String(64))
    """Key of the device, which may have readings before its first measurement."""
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


class EventRow(Base):
    """An event of a campaign."""

    __tablename__ = "events"

    id: Mapped[int] = mapped_column(BIG, primary_key=True)
    campaign_id: Mapped[str] = mapped_column(ForeignKey("campaigns.id"))
    at: Mapped[str] = mapped_column(UtcTime)
    kind: Mapped[str] = mapped_column(String(64))
    message: Mapped[dict[str, Any]]
    call_id: Mapped[str | None] = mapped_column(String(32), index=True)
    """`transactions.WriteCall` that added it, so that a repeated one adds it once."""

    __table_args__ = (Index(None, "campaign_id", "kind"),)


METADATA = Base.metadata

SCHEMA = "0020"
"""Version of this schema."""
VERSION_TABLE = Table(
    "alembic_version", METADATA, Column("version_num", String(32), primary_key=True)
)

CONFIGURATION = tuple(
    column for column in ConfigurationRow.__table__.columns if column.name not in {"id", "family"}
)
"""Columns that `records.configuration_of` needs. Entities take twice the time to read."""
