"""The schema of TraPPM 0.3, made from `store.schema`.

Revision ID: 0013
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0013"
down_revision = None
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
DOCUMENT = sa.JSON(none_as_null=True).with_variant(
    postgresql.JSONB(none_as_null=True), "postgresql"
)
TIME = sa.DateTime(timezone=True)


def one_of(name: str, *values: str) -> sa.Enum:
    return sa.Enum(*values, name=name, native_enum=False, create_constraint=True, length=16)


def upgrade() -> None:
    op.create_table(
        "campaigns",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("spec", DOCUMENT, nullable=False),
        sa.Column("seed", BIG, nullable=False),
        sa.Column(
            "state",
            one_of("campaignstate", "running", "paused", "finished", "failed", "cancelled"),
            nullable=False,
        ),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("finished_at", TIME, nullable=True),
        sa.Column("owner_id", sa.String(length=32), nullable=True),
        sa.Column("owner_process", DOCUMENT, nullable=True),
        sa.Column("owned_since", TIME, nullable=True),
        sa.Column("owner_seen_at", TIME, nullable=True),
        sa.CheckConstraint(
            "(finished_at IS NOT NULL) = (state IN ('finished', 'cancelled'))",
            name=op.f("ck_campaigns_finished_at"),
        ),
        sa.CheckConstraint(
            "(owner_id IS NULL) = (owner_process IS NULL) "
            "AND (owner_id IS NULL) = (owned_since IS NULL) "
            "AND (owner_id IS NULL) = (owner_seen_at IS NULL)",
            name=op.f("ck_campaigns_owner"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_campaigns")),
    )
    op.create_table(
        "configurations",
        sa.Column("id", sa.String(length=20), nullable=False),
        sa.Column("architecture", sa.String(length=200), nullable=False),
        sa.Column("family", sa.String(length=64), nullable=False),
        sa.Column("batch_size", sa.Integer(), nullable=False),
        sa.Column("input_size", sa.Integer(), nullable=False),
        sa.Column("precision", sa.String(length=16), nullable=False),
        sa.Column("memory_format", sa.String(length=16), nullable=False),
        sa.Column("optimizer", sa.String(length=16), nullable=False),
        sa.Column("phase", sa.String(length=16), nullable=False),
        sa.CheckConstraint("batch_size > 0", name=op.f("ck_configurations_batch_size_positive")),
        sa.CheckConstraint("input_size > 0", name=op.f("ck_configurations_input_size_positive")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_configurations")),
    )
    op.create_index(op.f("ix_configurations_architecture"), "configurations", ["architecture"])
    op.create_index(
        op.f("ix_configurations_family_architecture_batch_size_input_size"),
        "configurations",
        ["family", "architecture", "batch_size", "input_size"],
    )
    op.create_table(
        "devices",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("environment", DOCUMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_devices")),
        sa.UniqueConstraint("key", "fingerprint", name=op.f("uq_devices_key_fingerprint")),
    )
    op.create_table(
        "graphs",
        sa.Column("content_hash", sa.String(length=64), nullable=False),
        sa.Column("template", sa.LargeBinary(), nullable=False),
        sa.Column("node_count", sa.Integer(), nullable=False),
        sa.CheckConstraint("node_count > 0", name=op.f("ck_graphs_node_count_positive")),
        sa.PrimaryKeyConstraint("content_hash", name=op.f("pk_graphs")),
    )
    op.create_index(op.f("ix_graphs_node_count"), "graphs", ["node_count"])
    op.create_table(
        "kernel_conditions",
        sa.Column("content_hash", sa.String(length=64), nullable=False),
        sa.Column("protocol", DOCUMENT, nullable=False),
        sa.Column("environment", DOCUMENT, nullable=False),
        sa.PrimaryKeyConstraint("content_hash", name=op.f("pk_kernel_conditions")),
    )
    op.create_table(
        "pools",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("spec", DOCUMENT, nullable=False),
        sa.Column("built_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_pools")),
        sa.UniqueConstraint("name", name=op.f("uq_pools_name")),
    )
    op.create_table(
        "step_profiles",
        sa.Column("architecture", sa.String(length=200), nullable=False),
        sa.Column("input_size", sa.Integer(), nullable=False),
        sa.Column("profile", sa.LargeBinary(), nullable=True),
        sa.Column("saved_bytes_constant", BIG, nullable=True),
        sa.Column("saved_bytes_per_sample", BIG, nullable=True),
        sa.Column("trainable_parameters", BIG, nullable=True),
        sa.Column("frozen_parameters", BIG, nullable=True),
        sa.Column("refusal", sa.Text(), nullable=True),
        sa.Column("trace_version", sa.Integer(), server_default="1", nullable=False),
        sa.CheckConstraint(
            "(frozen_parameters IS NULL) = (profile IS NULL)",
            name=op.f("ck_step_profiles_frozen_parameters"),
        ),
        sa.CheckConstraint(
            "(profile IS NULL) <> (refusal IS NULL)",
            name=op.f("ck_step_profiles_profile_or_refusal"),
        ),
        sa.CheckConstraint(
            "(saved_bytes_constant IS NULL) = (profile IS NULL)",
            name=op.f("ck_step_profiles_saved_bytes_constant"),
        ),
        sa.CheckConstraint(
            "(saved_bytes_per_sample IS NULL) = (profile IS NULL)",
            name=op.f("ck_step_profiles_saved_bytes_per_sample"),
        ),
        sa.CheckConstraint(
            "(trainable_parameters IS NULL) = (profile IS NULL)",
            name=op.f("ck_step_profiles_trainable_parameters"),
        ),
        sa.PrimaryKeyConstraint("architecture", "input_size", name=op.f("pk_step_profiles")),
    )
    op.create_table(
        "architecture_graphs",
        sa.Column("architecture", sa.String(length=200), nullable=False),
        sa.Column("input_size", sa.Integer(), nullable=False),
        sa.Column("graph_hash", sa.String(length=64), nullable=True),
        sa.Column("refusal", sa.Text(), nullable=True),
        sa.CheckConstraint(
            "(graph_hash IS NULL) <> (refusal IS NULL)",
            name=op.f("ck_architecture_graphs_graph_or_refusal"),
        ),
        sa.ForeignKeyConstraint(
            ["graph_hash"], ["graphs.content_hash"], name=op.f("fk_architecture_graphs_graph_hash")
        ),
        sa.PrimaryKeyConstraint("architecture", "input_size", name=op.f("pk_architecture_graphs")),
    )
    op.create_index(
        op.f("ix_architecture_graphs_graph_hash"), "architecture_graphs", ["graph_hash"]
    )
    op.create_table(
        "campaign_pool",
        sa.Column("campaign_id", sa.String(length=16), nullable=False),
        sa.Column("configuration_id", sa.String(length=20), nullable=False),
        sa.Column("held_out", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["campaign_id"], ["campaigns.id"], name=op.f("fk_campaign_pool_campaign_id")
        ),
        sa.ForeignKeyConstraint(
            ["configuration_id"],
            ["configurations.id"],
            name=op.f("fk_campaign_pool_configuration_id"),
        ),
        sa.PrimaryKeyConstraint("campaign_id", "configuration_id", name=op.f("pk_campaign_pool")),
    )
    op.create_table(
        "canaries",
        sa.Column("id", BIG, nullable=False),
        sa.Column("attempt_key", sa.String(length=64), nullable=False),
        sa.Column("taken_at", TIME, nullable=False),
        sa.Column("host", sa.String(length=255), nullable=False),
        sa.Column("device", sa.String(length=64), nullable=False),
        sa.Column("stack_fingerprint", sa.String(length=64), nullable=False),
        sa.Column("configuration_id", sa.String(length=20), nullable=False),
        sa.Column("protocol", sa.String(length=64), nullable=False),
        sa.Column("campaign_id", sa.String(length=16), nullable=True),
        sa.Column(
            "outcome",
            one_of("outcome", "ok", "oom", "timeout", "unsupported", "unstable", "error"),
            nullable=False,
        ),
        sa.Column("step_time_ms", sa.Double(), nullable=True),
        sa.Column("memory_mib", sa.Double(), nullable=True),
        sa.Column("power_w", sa.Double(), nullable=True),
        sa.Column("reference_ms", sa.Double(), nullable=True),
        sa.Column("relative_drift", sa.Double(), nullable=True),
        sa.Column("decision", one_of("canarydecision", "ok", "drifting", "stop"), nullable=False),
        sa.Column("message", sa.Text(), nullable=True),
        sa.CheckConstraint(
            "(message IS NULL) = (decision = 'ok')", name=op.f("ck_canaries_message")
        ),
        sa.CheckConstraint(
            "step_time_ms IS NULL OR outcome = 'ok'", name=op.f("ck_canaries_step_time")
        ),
        sa.CheckConstraint("memory_mib > 0", name=op.f("ck_canaries_memory_mib_positive")),
        sa.CheckConstraint("power_w > 0", name=op.f("ck_canaries_power_w_positive")),
        sa.CheckConstraint("reference_ms > 0", name=op.f("ck_canaries_reference_ms_positive")),
        sa.CheckConstraint("step_time_ms > 0", name=op.f("ck_canaries_step_time_ms_positive")),
        sa.ForeignKeyConstraint(
            ["campaign_id"], ["campaigns.id"], name=op.f("fk_canaries_campaign_id")
        ),
        sa.ForeignKeyConstraint(
            ["configuration_id"], ["configurations.id"], name=op.f("fk_canaries_configuration_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_canaries")),
        sa.UniqueConstraint("attempt_key", name=op.f("uq_canaries_attempt_key")),
    )
    op.create_index(op.f("ix_canaries_campaign_id"), "canaries", ["campaign_id"])
    op.create_index(
        op.f("ix_canaries_device_stack_fingerprint_host_taken_at"),
        "canaries",
        ["device", "stack_fingerprint", "host", "taken_at"],
    )
    op.create_table(
        "events",
        sa.Column("id", BIG, nullable=False),
        sa.Column("campaign_id", sa.String(length=16), nullable=False),
        sa.Column("at", TIME, nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("message", DOCUMENT, nullable=False),
        sa.ForeignKeyConstraint(
            ["campaign_id"], ["campaigns.id"], name=op.f("fk_events_campaign_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
    )
    op.create_index(op.f("ix_events_campaign_id"), "events", ["campaign_id"])
    op.create_table(
        "kernel_measurements",
        sa.Column("id", BIG, nullable=False),
        sa.Column("attempt_key", sa.String(length=64), nullable=False),
        sa.Column("device_id", sa.Integer(), nullable=False),
        sa.Column("conditions_hash", sa.String(length=64), nullable=False),
        sa.Column("call", sa.String(length=300), nullable=False),
        sa.Column("operator", sa.String(length=32), nullable=False),
        sa.Column("data_type", sa.String(length=8), nullable=False),
        sa.Column("memory_format", sa.String(length=16), nullable=False),
        sa.Column("direction", sa.String(length=16), nullable=False),
        sa.Column("tf32", sa.Boolean(), nullable=False),
        sa.Column(
            "provenance", one_of("provenance", "measured", "imported", "simulated"), nullable=False
        ),
        sa.Column(
            "outcome",
            one_of("outcome", "ok", "oom", "timeout", "unsupported", "unstable", "error"),
            nullable=False,
        ),
        sa.Column("failed_in", sa.String(length=16), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("started_at", TIME, nullable=False),
        sa.Column("duration_s", sa.Double(), nullable=False),
        sa.Column("samples_ms", sa.LargeBinary(), nullable=False),
        sa.Column("time_ms", sa.Double(), nullable=True),
        sa.Column("iqr_ms", sa.Double(), nullable=True),
        sa.Column("power_w", sa.Double(), nullable=True),
        sa.Column("energy_j", sa.Double(), nullable=True),
        sa.Column("missing", DOCUMENT, nullable=False),
        sa.Column("facts", DOCUMENT, nullable=False),
        sa.CheckConstraint(
            "outcome <> 'ok' OR time_ms IS NOT NULL",
            name=op.f("ck_kernel_measurements_ok_has_a_time"),
        ),
        sa.CheckConstraint("duration_s >= 0", name=op.f("ck_kernel_measurements_duration_s")),
        sa.CheckConstraint("energy_j > 0", name=op.f("ck_kernel_measurements_energy_j_positive")),
        sa.CheckConstraint("iqr_ms >= 0", name=op.f("ck_kernel_measurements_iqr_ms")),
        sa.CheckConstraint("power_w > 0", name=op.f("ck_kernel_measurements_power_w_positive")),
        sa.CheckConstraint("time_ms > 0", name=op.f("ck_kernel_measurements_time_ms_positive")),
        sa.ForeignKeyConstraint(
            ["conditions_hash"],
            ["kernel_conditions.content_hash"],
            name=op.f("fk_kernel_measurements_conditions_hash"),
        ),
        sa.ForeignKeyConstraint(
            ["device_id"], ["devices.id"], name=op.f("fk_kernel_measurements_device_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_kernel_measurements")),
        sa.UniqueConstraint("attempt_key", name=op.f("uq_kernel_measurements_attempt_key")),
    )
    op.create_index(op.f("ix_kernel_measurements_call"), "kernel_measurements", ["call"])
    op.create_index(
        op.f("ix_kernel_measurements_conditions_hash"), "kernel_measurements", ["conditions_hash"]
    )
    op.create_index(
        op.f("ix_kernel_measurements_device_id_operator_outcome"),
        "kernel_measurements",
        ["device_id", "operator", "outcome"],
    )
    op.create_table(
        "pool_members",
        sa.Column("pool_id", sa.Integer(), nullable=False),
        sa.Column("configuration_id", sa.String(length=20), nullable=False),
        sa.ForeignKeyConstraint(
            ["configuration_id"],
            ["configurations.id"],
            name=op.f("fk_pool_members_configuration_id"),
        ),
        sa.ForeignKeyConstraint(["pool_id"], ["pools.id"], name=op.f("fk_pool_members_pool_id")),
        sa.PrimaryKeyConstraint("pool_id", "configuration_id", name=op.f("pk_pool_members")),
    )
    op.create_table(
        "rounds",
        sa.Column("campaign_id", sa.String(length=16), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column(
            "purpose", one_of("purpose", "evaluation", "initial", "acquired"), nullable=False
        ),
        sa.Column("state", one_of("roundstate", "open", "closed"), nullable=False),
        sa.Column("report", DOCUMENT, nullable=True),
        sa.CheckConstraint(
            "(report IS NOT NULL) = (state = 'closed')", name=op.f("ck_rounds_report")
        ),
        sa.CheckConstraint("number >= 0", name=op.f("ck_rounds_number")),
        sa.ForeignKeyConstraint(
            ["campaign_id"], ["campaigns.id"], name=op.f("fk_rounds_campaign_id")
        ),
        sa.PrimaryKeyConstraint("campaign_id", "number", name=op.f("pk_rounds")),
    )
    op.create_table(
        "snapshots",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("campaign_id", sa.String(length=16), nullable=True),
        sa.Column("location", sa.String(length=1000), nullable=False),
        sa.Column("manifest", DOCUMENT, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(
            ["campaign_id"], ["campaigns.id"], name=op.f("fk_snapshots_campaign_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_snapshots")),
    )
    op.create_index(op.f("ix_snapshots_campaign_id"), "snapshots", ["campaign_id"])
    op.create_table(
        "assignments",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("campaign_id", sa.String(length=16), nullable=False),
        sa.Column("round_number", sa.Integer(), nullable=False),
        sa.Column("configuration_id", sa.String(length=20), nullable=False),
        sa.Column("device_key", sa.String(length=64), nullable=False),
        sa.Column("role", one_of("role", "train", "evaluate"), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("reason", DOCUMENT, nullable=False),
        sa.Column(
            "state", one_of("assignmentstate", "open", "leased", "done", "failed"), nullable=False
        ),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("worker", sa.String(length=200), nullable=True),
        sa.CheckConstraint(
            "(worker IS NOT NULL) = (state = 'leased')", name=op.f("ck_assignments_worker")
        ),
        sa.CheckConstraint("failures BETWEEN 0 AND attempts", name=op.f("ck_assignments_attempts")),
        sa.ForeignKeyConstraint(
            ["campaign_id", "configuration_id"],
            ["campaign_pool.campaign_id", "campaign_pool.configuration_id"],
            name=op.f("fk_assignments_campaign_id_configuration_id"),
        ),
        sa.ForeignKeyConstraint(
            ["campaign_id", "round_number"],
            ["rounds.campaign_id", "rounds.number"],
            name=op.f("fk_assignments_campaign_id_round_number"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_assignments")),
        sa.UniqueConstraint(
            "campaign_id",
            "configuration_id",
            "device_key",
            name=op.f("uq_assignments_campaign_id_configuration_id_device_key"),
        ),
    )
    op.create_index(
        op.f("ix_assignments_campaign_id_device_key_state_round_number_rank"),
        "assignments",
        ["campaign_id", "device_key", "state", "round_number", "rank"],
    )
    op.create_table(
        "measurements",
        sa.Column("id", BIG, nullable=False),
        sa.Column("attempt_key", sa.String(length=64), nullable=False),
        sa.Column("configuration_id", sa.String(length=20), nullable=False),
        sa.Column("device_id", sa.Integer(), nullable=False),
        sa.Column("protocol_name", sa.String(length=64), nullable=False),
        sa.Column("protocol", DOCUMENT, nullable=False),
        sa.Column("campaign_id", sa.String(length=16), nullable=True),
        sa.Column("assignment_id", sa.String(length=32), nullable=True),
        sa.Column(
            "provenance", one_of("provenance", "measured", "imported", "simulated"), nullable=False
        ),
        sa.Column(
            "outcome",
            one_of("outcome", "ok", "oom", "timeout", "unsupported", "unstable", "error"),
            nullable=False,
        ),
        sa.Column("failed_in", sa.String(length=16), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("started_at", TIME, nullable=False),
        sa.Column("duration_s", sa.Double(), nullable=False),
        sa.Column("step_samples_ms", sa.LargeBinary(), nullable=False),
        sa.Column("step_median_ms", sa.Double(), nullable=True),
        sa.Column("step_mean_ms", sa.Double(), nullable=True),
        sa.Column("step_iqr_ms", sa.Double(), nullable=True),
        sa.Column("step_p95_ms", sa.Double(), nullable=True),
        sa.Column("step_forward_share", sa.Double(), nullable=True),
        sa.Column("step_backward_share", sa.Double(), nullable=True),
        sa.Column("step_optimizer_share", sa.Double(), nullable=True),
        sa.Column("memory_mib", sa.Double(), nullable=True),
        sa.Column("power_w", sa.Double(), nullable=True),
        sa.Column("energy_j", sa.Double(), nullable=True),
        sa.Column("memory_detail_mib", DOCUMENT, nullable=False),
        sa.Column("missing", DOCUMENT, nullable=False),
        sa.Column("environment", DOCUMENT, nullable=False),
        sa.CheckConstraint(
            "(step_median_ms IS NULL) = (step_mean_ms IS NULL) "
            "AND (step_median_ms IS NULL) = (step_iqr_ms IS NULL) "
            "AND (step_median_ms IS NULL) = (step_p95_ms IS NULL)",
            name=op.f("ck_measurements_step_summary"),
        ),
        sa.CheckConstraint("duration_s >= 0", name=op.f("ck_measurements_duration_s")),
        sa.CheckConstraint("energy_j > 0", name=op.f("ck_measurements_energy_j_positive")),
        sa.CheckConstraint("memory_mib > 0", name=op.f("ck_measurements_memory_mib_positive")),
        sa.CheckConstraint("power_w > 0", name=op.f("ck_measurements_power_w_positive")),
        sa.CheckConstraint("step_iqr_ms >= 0", name=op.f("ck_measurements_step_iqr_ms")),
        sa.CheckConstraint("step_mean_ms > 0", name=op.f("ck_measurements_step_mean_ms_positive")),
        sa.CheckConstraint(
            "step_median_ms > 0", name=op.f("ck_measurements_step_median_ms_positive")
        ),
        sa.CheckConstraint("step_p95_ms > 0", name=op.f("ck_measurements_step_p95_ms_positive")),
        sa.ForeignKeyConstraint(
            ["assignment_id"], ["assignments.id"], name=op.f("fk_measurements_assignment_id")
        ),
        sa.ForeignKeyConstraint(
            ["campaign_id"], ["campaigns.id"], name=op.f("fk_measurements_campaign_id")
        ),
        sa.ForeignKeyConstraint(
            ["configuration_id"],
            ["configurations.id"],
            name=op.f("fk_measurements_configuration_id"),
        ),
        sa.ForeignKeyConstraint(
            ["device_id"], ["devices.id"], name=op.f("fk_measurements_device_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_measurements")),
        sa.UniqueConstraint("attempt_key", name=op.f("uq_measurements_attempt_key")),
    )
    op.create_index(op.f("ix_measurements_assignment_id"), "measurements", ["assignment_id"])
    op.create_index(op.f("ix_measurements_campaign_id"), "measurements", ["campaign_id"])
    op.create_index(
        op.f("ix_measurements_configuration_id_device_id"),
        "measurements",
        ["configuration_id", "device_id"],
    )
    op.create_index(
        op.f("ix_measurements_outcome_id"), "measurements", ["outcome", "id"], unique=True
    )
    op.create_index(op.f("ix_measurements_started_at"), "measurements", ["started_at"])
    op.create_table(
        "labels",
        sa.Column("id", BIG, nullable=False),
        sa.Column("configuration_id", sa.String(length=20), nullable=False),
        sa.Column("device_id", sa.Integer(), nullable=False),
        sa.Column("protocol_name", sa.String(length=64), nullable=False),
        sa.Column("measurement_id", BIG, nullable=False),
        sa.Column(
            "outcome",
            one_of("outcome", "ok", "oom", "timeout", "unsupported", "unstable", "error"),
            nullable=False,
        ),
        sa.Column(
            "provenance", one_of("provenance", "measured", "imported", "simulated"), nullable=False
        ),
        sa.Column("step_time_ms", sa.Double(), nullable=True),
        sa.Column("memory_mib", sa.Double(), nullable=True),
        sa.Column("memory_above_mib", sa.Double(), nullable=True),
        sa.Column("power_w", sa.Double(), nullable=True),
        sa.Column("energy_j", sa.Double(), nullable=True),
        sa.Column("created_at", TIME, nullable=False),
        sa.CheckConstraint(
            "(outcome = 'ok' AND memory_above_mib IS NULL) "
            "OR (outcome = 'oom' AND memory_above_mib IS NOT NULL)",
            name=op.f("ck_labels_ok_or_censored"),
        ),
        sa.CheckConstraint("energy_j > 0", name=op.f("ck_labels_energy_j_positive")),
        sa.CheckConstraint(
            "memory_above_mib > 0", name=op.f("ck_labels_memory_above_mib_positive")
        ),
        sa.CheckConstraint("memory_mib > 0", name=op.f("ck_labels_memory_mib_positive")),
        sa.CheckConstraint(
            "memory_mib IS NULL OR memory_above_mib IS NULL", name=op.f("ck_labels_value_or_bound")
        ),
        sa.CheckConstraint("power_w > 0", name=op.f("ck_labels_power_w_positive")),
        sa.CheckConstraint("step_time_ms > 0", name=op.f("ck_labels_step_time_ms_positive")),
        sa.CheckConstraint(
            "step_time_ms IS NOT NULL "
            "OR memory_mib IS NOT NULL "
            "OR power_w IS NOT NULL "
            "OR memory_above_mib IS NOT NULL",
            name=op.f("ck_labels_some_metric"),
        ),
        sa.ForeignKeyConstraint(
            ["configuration_id"], ["configurations.id"], name=op.f("fk_labels_configuration_id")
        ),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name=op.f("fk_labels_device_id")),
        sa.ForeignKeyConstraint(
            ["measurement_id", "outcome"],
            ["measurements.id", "measurements.outcome"],
            name=op.f("fk_labels_measurement_id_outcome"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_labels")),
        sa.UniqueConstraint(
            "configuration_id",
            "device_id",
            "protocol_name",
            name=op.f("uq_labels_configuration_id_device_id_protocol_name"),
        ),
        sa.UniqueConstraint("measurement_id", name=op.f("uq_labels_measurement_id")),
    )
    op.create_index(op.f("ix_labels_created_at"), "labels", ["created_at"])
    op.create_index(op.f("ix_labels_device_id"), "labels", ["device_id"])
    op.create_table(
        "assignment_labels",
        sa.Column("assignment_id", sa.String(length=32), nullable=False),
        sa.Column("label_id", BIG, nullable=False),
        sa.ForeignKeyConstraint(
            ["assignment_id"], ["assignments.id"], name=op.f("fk_assignment_labels_assignment_id")
        ),
        sa.ForeignKeyConstraint(
            ["label_id"], ["labels.id"], name=op.f("fk_assignment_labels_label_id")
        ),
        sa.PrimaryKeyConstraint("assignment_id", name=op.f("pk_assignment_labels")),
    )
    op.create_index(op.f("ix_assignment_labels_label_id"), "assignment_labels", ["label_id"])
