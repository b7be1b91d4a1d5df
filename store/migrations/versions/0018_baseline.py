"""The tables of the first schema that later versions can upgrade, as they were then."""

from __future__ import annotations

from typing import Any

from alembic import op
from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Double,
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
    UniqueConstraint,
)
from sqlalchemy.dialects.postgresql import JSONB

revision = "0018"
down_revision = None

TABLES = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)
TIME = DateTime(timezone=True)
JSON_ = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
BIG = BigInteger().with_variant(Integer, "sqlite")


def upgrade() -> None:
    TABLES.create_all(op.get_bind())


def required(name: str, *arguments: Any, **options: Any) -> Column[Any]:
    return Column(name, *arguments, **options, nullable=False)


def one_of(name: str, *values: str) -> Enum:
    return Enum(*values, name=name, native_enum=False, create_constraint=True, length=16)


def positive(*columns: str) -> tuple[CheckConstraint, ...]:
    return tuple(CheckConstraint(f"{column} > 0", name=f"{column}_positive") for column in columns)


OUTCOME = one_of("outcome", "ok", "oom", "timeout", "unsupported", "unstable", "error")
PROVENANCE = one_of("provenance", "measured", "imported", "simulated")

Table(
    "campaigns",
    TABLES,
    Column("id", String(16), primary_key=True),
    required("name", String(200)),
    required("spec", JSON_),
    required("seed", BIG),
    required(
        "state", one_of("campaignstate", "running", "paused", "finished", "failed", "cancelled")
    ),
    required("created_at", TIME),
    Column("finished_at", TIME),
    Column("snapshot", String(64)),
    Column("owner_id", String(32)),
    Column("owner_process", JSON_),
    Column("owned_since", TIME),
    Column("owner_seen_at", TIME),
    CheckConstraint(
        "(finished_at IS NOT NULL) = (state IN ('finished', 'cancelled'))", name="finished_at"
    ),
    CheckConstraint(
        "(owner_id IS NULL) = (owner_process IS NULL)"
        " AND (owner_id IS NULL) = (owned_since IS NULL)"
        " AND (owner_id IS NULL) = (owner_seen_at IS NULL)",
        name="owner",
    ),
)
Table(
    "configurations",
    TABLES,
    Column("id", String(20), primary_key=True),
    required("architecture", String(200), index=True),
    required("family", String(64)),
    required("batch_size", Integer),
    required("input_size", Integer),
    required("precision", String(16)),
    required("memory_format", String(16)),
    required("optimizer", String(16)),
    required("phase", String(16)),
    required("execution", String(16)),
    *positive("batch_size", "input_size"),
    Index(None, "family", "architecture", "batch_size", "input_size"),
)
Table(
    "devices",
    TABLES,
    Column("id", Integer, primary_key=True),
    required("key", String(64)),
    required("fingerprint", String(64)),
    required("environment", JSON_),
    UniqueConstraint("key", "fingerprint"),
)
Table(
    "graphs",
    TABLES,
    Column("content_hash", String(64), primary_key=True),
    required("template", LargeBinary),
    required("node_count", Integer, index=True),
    *positive("node_count"),
)
Table(
    "campaign_pool",
    TABLES,
    Column("campaign_id", String(16), ForeignKey("campaigns.id"), primary_key=True),
    Column("configuration_id", String(20), ForeignKey("configurations.id"), primary_key=True),
    required("held_out", Boolean),
)
Table(
    "canaries",
    TABLES,
    Column("id", BIG, primary_key=True),
    required("attempt_key", String(64), unique=True),
    required("taken_at", TIME),
    required("host", String(255)),
    required("device", String(64)),
    required("stack_fingerprint", String(64)),
    required("configuration_id", String(20), ForeignKey("configurations.id")),
    required("protocol", String(64)),
    Column("campaign_id", String(16), ForeignKey("campaigns.id"), index=True),
    required("outcome", OUTCOME),
    Column("step_time_ms", Double),
    Column("memory_mib", Double),
    Column("power_w", Double),
    Column("reference_ms", Double),
    Column("relative_drift", Double),
    required("decision", one_of("canarydecision", "ok", "drifting", "stop")),
    Column("message", Text),
    CheckConstraint("step_time_ms IS NULL OR outcome = 'ok'", name="step_time"),
    CheckConstraint("(message IS NULL) = (decision = 'ok')", name="message"),
    *positive("step_time_ms", "memory_mib", "power_w", "reference_ms"),
    Index(None, "device", "stack_fingerprint", "host", "taken_at"),
)
Table(
    "events",
    TABLES,
    Column("id", BIG, primary_key=True),
    required("campaign_id", String(16), ForeignKey("campaigns.id"), index=True),
    required("at", TIME),
    required("kind", String(64)),
    required("message", JSON_),
)
Table(
    "pool_members",
    TABLES,
    Column("pool", String(64), primary_key=True),
    Column("configuration_id", String(20), ForeignKey("configurations.id"), primary_key=True),
)
Table(
    "rounds",
    TABLES,
    Column("campaign_id", String(16), ForeignKey("campaigns.id"), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    required("purpose", one_of("purpose", "evaluation", "initial", "acquired")),
    Column("report", JSON_),
    CheckConstraint("number >= 0", name="number"),
)
Table(
    "traces",
    TABLES,
    Column("digest", String(32), primary_key=True),
    required("architecture", String(200), index=True),
    Column("input_size", Integer),
    required("precision", String(16)),
    required("memory_format", String(16)),
    required("execution", String(16)),
    required("fused_attention", Boolean),
    required("phase", String(16)),
    Column("graph_hash", String(64), ForeignKey("graphs.content_hash"), index=True),
    Column("refusal", Text),
    Column("data", LargeBinary),
    required("size", Integer),
    required("created_at", TIME),
    CheckConstraint("data IS NOT NULL OR refusal IS NOT NULL", name="step_or_refusal"),
    CheckConstraint("data IS NOT NULL OR graph_hash IS NULL", name="graph_of_step"),
    Index(None, "created_at", "size"),
)
Table(
    "assignments",
    TABLES,
    Column("id", String(32), primary_key=True),
    required("campaign_id", String(16)),
    required("round_number", Integer),
    required("configuration_id", String(20)),
    required("device_key", String(64)),
    required("role", one_of("role", "train", "evaluate")),
    required("rank", Integer),
    required("reason", JSON_),
    required("state", one_of("assignmentstate", "open", "leased", "done", "failed")),
    required("attempts", Integer),
    required("failures", Integer),
    Column("worker", String(200)),
    ForeignKeyConstraint(
        ["campaign_id", "configuration_id"],
        ["campaign_pool.campaign_id", "campaign_pool.configuration_id"],
    ),
    ForeignKeyConstraint(["campaign_id", "round_number"], ["rounds.campaign_id", "rounds.number"]),
    UniqueConstraint("campaign_id", "configuration_id", "device_key"),
    CheckConstraint("(worker IS NOT NULL) = (state = 'leased')", name="worker"),
    CheckConstraint("failures BETWEEN 0 AND attempts", name="attempts"),
    Index(None, "campaign_id", "device_key", "state", "round_number", "rank"),
)
Table(
    "measurements",
    TABLES,
    Column("id", BIG, primary_key=True),
    required("attempt_key", String(64), unique=True),
    required("configuration_id", String(20), ForeignKey("configurations.id")),
    required("device_id", Integer, ForeignKey("devices.id")),
    required("protocol_name", String(64)),
    required("protocol", JSON_),
    Column("campaign_id", String(16), ForeignKey("campaigns.id"), index=True),
    Column("assignment_id", String(32), ForeignKey("assignments.id"), index=True),
    required("provenance", PROVENANCE),
    required("outcome", OUTCOME),
    Column("failed_in", String(16)),
    Column("message", Text),
    required("started_at", TIME, index=True),
    required("duration_s", Double),
    required("step_samples_ms", LargeBinary),
    Column("step_median_ms", Double),
    Column("step_mean_ms", Double),
    Column("step_iqr_ms", Double),
    Column("step_p95_ms", Double),
    Column("step_forward_share", Double),
    Column("step_backward_share", Double),
    Column("step_optimizer_share", Double),
    Column("memory_mib", Double),
    Column("power_w", Double),
    Column("energy_j", Double),
    required("memory_detail_mib", JSON_),
    required("missing", JSON_),
    required("environment", JSON_),
    CheckConstraint("step_iqr_ms >= 0", name="step_iqr_ms"),
    CheckConstraint(
        "(step_median_ms IS NULL) = (step_mean_ms IS NULL)"
        " AND (step_median_ms IS NULL) = (step_iqr_ms IS NULL)"
        " AND (step_median_ms IS NULL) = (step_p95_ms IS NULL)",
        name="step_summary",
    ),
    CheckConstraint("duration_s >= 0", name="duration_s"),
    *positive("step_median_ms", "step_mean_ms", "step_p95_ms", "memory_mib", "power_w", "energy_j"),
    Index(None, "configuration_id", "device_id"),
    Index(None, "outcome", "id", unique=True),
)
Table(
    "labels",
    TABLES,
    Column("id", BIG, primary_key=True),
    required("configuration_id", String(20), ForeignKey("configurations.id")),
    required("device_id", Integer, ForeignKey("devices.id"), index=True),
    required("protocol_name", String(64)),
    required("measurement_id", BIG, unique=True),
    required("outcome", OUTCOME),
    required("provenance", PROVENANCE),
    Column("step_time_ms", Double),
    Column("memory_mib", Double),
    Column("memory_above_mib", Double),
    Column("power_w", Double),
    Column("energy_j", Double),
    required("created_at", TIME, index=True),
    ForeignKeyConstraint(
        ["measurement_id", "outcome"], ["measurements.id", "measurements.outcome"]
    ),
    UniqueConstraint("configuration_id", "device_id", "protocol_name"),
    CheckConstraint(
        "step_time_ms IS NOT NULL OR memory_mib IS NOT NULL OR power_w IS NOT NULL"
        " OR memory_above_mib IS NOT NULL",
        name="some_metric",
    ),
    CheckConstraint("memory_mib IS NULL OR memory_above_mib IS NULL", name="value_or_bound"),
    CheckConstraint(
        "(outcome = 'ok' AND memory_above_mib IS NULL) OR (outcome = 'oom'"
        " AND memory_above_mib IS NOT NULL)",
        name="ok_or_censored",
    ),
    *positive("step_time_ms", "memory_mib", "memory_above_mib", "power_w", "energy_j"),
)
Table(
    "assignment_labels",
    TABLES,
    Column("assignment_id", String(32), ForeignKey("assignments.id"), primary_key=True),
    required("label_id", BIG, ForeignKey("labels.id"), index=True),
)
