"""Who runs a campaign stands in its row, and assignments are leased for as long as that one runs.

A lease had a time of its own at which it lapsed; now its campaign's owner does, whose heartbeat
covers all that it has given to workers.

Revision ID: 0009
Revises: 0008
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

OWNER = (
    "(owner_id IS NULL) = (owner_process IS NULL)"
    " AND (owner_id IS NULL) = (owned_since IS NULL)"
    " AND (owner_id IS NULL) = (owner_seen_at IS NULL)"
)


def upgrade() -> None:
    on_sqlite = op.get_bind().dialect.name == "sqlite"
    json = sa.JSON() if on_sqlite else sa.dialects.postgresql.JSONB()
    op.add_column("campaigns", sa.Column("owner_id", sa.String(length=32), nullable=True))
    op.add_column("campaigns", sa.Column("owner_process", json, nullable=True))
    op.add_column("campaigns", sa.Column("owned_since", sa.DateTime(timezone=True), nullable=True))
    if on_sqlite:  # which takes a constraint with a column, and none afterwards
        op.execute(
            "ALTER TABLE campaigns ADD COLUMN owner_seen_at DATETIME"
            f" CONSTRAINT ck_campaigns_owner CHECK ({OWNER})"
        )
        _make_assignments_anew()
        return
    op.add_column(
        "campaigns", sa.Column("owner_seen_at", sa.DateTime(timezone=True), nullable=True)
    )
    op.create_check_constraint(op.f("ck_campaigns_owner"), "campaigns", OWNER)
    op.drop_constraint(op.f("ck_assignments_lease"), "assignments", type_="check")
    op.drop_column("assignments", "lease_expires_at")


def _make_assignments_anew() -> None:
    """SQLite drops no constraint; what refers to the rows is looked at when all are back."""
    op.execute("PRAGMA defer_foreign_keys = ON")
    op.execute("CREATE TEMPORARY TABLE kept AS SELECT * FROM assignments")
    op.drop_table("assignments")
    made = op.create_table(
        "assignments",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("campaign_id", sa.String(length=16), nullable=False),
        sa.Column("round_number", sa.Integer(), nullable=False),
        sa.Column("configuration_id", sa.String(length=20), nullable=False),
        sa.Column("device_key", sa.String(length=64), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("reason", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("worker", sa.String(length=200), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_assignments")),
        sa.CheckConstraint(
            "(worker IS NOT NULL) = (state = 'leased')", name=op.f("ck_assignments_worker")
        ),
        sa.CheckConstraint(
            "failures BETWEEN 0 AND attempts", name=op.f("ck_assignments_attempts")
        ),
        sa.CheckConstraint("role IN ('train', 'evaluate')", name=op.f("ck_assignments_role")),
        sa.CheckConstraint(
            "state IN ('open', 'leased', 'done', 'failed')",
            name=op.f("ck_assignments_assignmentstate"),
        ),
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
        sa.UniqueConstraint(
            "campaign_id", "configuration_id", "device_key",
            name=op.f("uq_assignments_campaign_id_configuration_id_device_key"),
        ),
    )  # fmt: skip
    columns = ", ".join(column.name for column in made.columns)
    op.execute(f"INSERT INTO assignments ({columns}) SELECT {columns} FROM kept")  # noqa: S608
    op.create_index(
        "ix_assignments_campaign_id_device_key_state_round_number_rank",
        "assignments",
        ["campaign_id", "device_key", "state", "round_number", "rank"],
    )
    op.execute("DROP TABLE kept")
