"""The first schema."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
TIME = sa.DateTime(timezone=True)


def one_of(name: str, *values: str) -> sa.Enum:
    return sa.Enum(*values, name=name, native_enum=False, create_constraint=True, length=16)


def upgrade() -> None:
    op.create_table(
        "campaigns",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("spec", JSON, nullable=False),
        sa.Column("seed", BIG, nullable=False),
        sa.Column(
            "state",
            one_of("campaignstate", "running", "paused", "finished", "failed", "cancelled"),
            nullable=False,
        ),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("finished_at", TIME, nullable=True),
        sa.CheckConstraint(
            "(finished_at IS NOT NULL) = (state IN ('finished', 'cancelled'))",
            name=op.f("ck_campaigns_finished_at"),
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
    op.create_index(op.f("ix_configurations_family"), "configurations", ["family"])
    op.create_table(
        "devices",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("environment", JSON, nullable=False),
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
        "events",
        sa.Column("id", BIG, nullable=False),
        sa.Column("campaign_id", sa.String(length=16), nullable=False),
        sa.Column("at", TIME, nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("message", JSON, nullable=False),
        sa.ForeignKeyConstraint(
            ["campaign_id"], ["campaigns.id"], name=op.f("fk_events_campaign_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
    )
    op.create_index(op.f("ix_events_campaign_id"), "events", ["campaign_id"])
    op.create_table(
        "rounds",
        sa.Column("campaign_id", sa.String(length=16), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column(
            "purpose", one_of("purpose", "evaluation", "initial", "acquired"), nullable=False
        ),
        sa.Column("state", one_of("roundstate", "open", "closed"), nullable=False),
        sa.Column("report", JSON, nullable=True),
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
        sa.Column("manifest", JSON, nullable=False),
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
        sa.Column("reason", JSON, nullable=False),
        sa.Column(
            "state", one_of("assignmentstate", "open", "leased", "done", "failed"), nullable=False
        ),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("worker", sa.String(length=200), nullable=True),
        sa.Column("lease_expires_at", TIME, nullable=True),
        sa.CheckConstraint(
            "(lease_expires_at IS NOT NULL) = (state = 'leased')", name=op.f("ck_assignments_lease")
        ),
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
        "snapshot_aliases",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("snapshot_id", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(
            ["snapshot_id"], ["snapshots.id"], name=op.f("fk_snapshot_aliases_snapshot_id")
        ),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_snapshot_aliases")),
    )
    op.create_table(
        "measurements",
        sa.Column("id", BIG, nullable=False),
        sa.Column("attempt_key", sa.String(length=64), nullable=False),
        sa.Column("configuration_id", sa.String(length=20), nullable=False),
        sa.Column("device_id", sa.Integer(), nullable=False),
        sa.Column("protocol_name", sa.String(length=64), nullable=False),
        sa.Column("protocol", JSON, nullable=False),
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
        sa.Column("memory_mib", sa.Double(), nullable=True),
        sa.Column("power_w", sa.Double(), nullable=True),
        sa.Column("energy_j", sa.Double(), nullable=True),
        sa.Column("memory_detail_mib", JSON, nullable=False),
        sa.Column("missing", JSON, nullable=False),
        sa.Column("environment", JSON, nullable=False),
        sa.CheckConstraint("duration_s >= 0", name=op.f("ck_measurements_duration_s")),
        sa.CheckConstraint("energy_j > 0", name=op.f("ck_measurements_energy_j_positive")),
        sa.CheckConstraint("memory_mib > 0", name=op.f("ck_measurements_memory_mib_positive")),
        sa.CheckConstraint("power_w > 0", name=op.f("ck_measurements_power_w_positive")),
        sa.CheckConstraint(
            "(step_median_ms IS NULL) = (step_mean_ms IS NULL)"
            " AND (step_median_ms IS NULL) = (step_iqr_ms IS NULL)"
            " AND (step_median_ms IS NULL) = (step_p95_ms IS NULL)",
            name=op.f("ck_measurements_step_summary"),
        ),
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
    op.create_table(
        "labels",
        sa.Column("id", BIG, nullable=False),
        sa.Column("configuration_id", sa.String(length=20), nullable=False),
        sa.Column("device_id", sa.Integer(), nullable=False),
        sa.Column("protocol_name", sa.String(length=64), nullable=False),
        sa.Column("measurement_id", BIG, nullable=False),
        sa.Column(
            "provenance", one_of("provenance", "measured", "imported", "simulated"), nullable=False
        ),
        sa.Column("step_time_ms", sa.Double(), nullable=True),
        sa.Column("memory_mib", sa.Double(), nullable=True),
        sa.Column("power_w", sa.Double(), nullable=True),
        sa.Column("energy_j", sa.Double(), nullable=True),
        sa.Column("created_at", TIME, nullable=False),
        sa.CheckConstraint("energy_j > 0", name=op.f("ck_labels_energy_j_positive")),
        sa.CheckConstraint("memory_mib > 0", name=op.f("ck_labels_memory_mib_positive")),
        sa.CheckConstraint("power_w > 0", name=op.f("ck_labels_power_w_positive")),
        sa.CheckConstraint("step_time_ms > 0", name=op.f("ck_labels_step_time_ms_positive")),
        sa.CheckConstraint(
            "step_time_ms IS NOT NULL OR memory_mib IS NOT NULL OR power_w IS NOT NULL",
            name=op.f("ck_labels_some_metric"),
        ),
        sa.ForeignKeyConstraint(
            ["configuration_id"], ["configurations.id"], name=op.f("fk_labels_configuration_id")
        ),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name=op.f("fk_labels_device_id")),
        sa.ForeignKeyConstraint(
            ["measurement_id"], ["measurements.id"], name=op.f("fk_labels_measurement_id")
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
