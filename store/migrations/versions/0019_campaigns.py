"""Losses and hosts of assignments, numbers planned by round and device, activities of campaigns."""

from __future__ import annotations

from collections import defaultdict

from alembic import op
from sqlalchemy import (
    JSON,
    Column,
    ForeignKey,
    Integer,
    PrimaryKeyConstraint,
    String,
    column,
    func,
    select,
    table,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB

revision = "0019"
down_revision = "0018"

JSON_ = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    op.create_table(
        "failed_hosts",
        Column(
            "assignment_id",
            String(32),
            ForeignKey("assignments.id", name="fk_failed_hosts_assignment_id"),
        ),
        Column("host", String(255)),
        PrimaryKeyConstraint("assignment_id", "host", name="pk_failed_hosts"),
    )
    _change_campaigns()
    _change_events()
    _change_rounds()
    _change_assignments()


def _change_campaigns() -> None:
    """Add activities; processes of owners are described in another way, so they are released."""
    op.add_column("campaigns", Column("activity", JSON_))
    op.execute(
        "UPDATE campaigns SET owner_id = NULL, owner_process = NULL, owned_since = NULL, "
        "owner_seen_at = NULL"
    )


def _change_events() -> None:
    op.add_column("events", Column("call_id", String(32)))
    op.create_index("ix_events_call_id", "events", ["call_id"])
    op.drop_index("ix_events_campaign_id", "events")
    op.create_index("ix_events_campaign_id_kind", "events", ["campaign_id", "kind"])


def _change_rounds() -> None:
    """Add the number of assignments by device."""
    op.add_column("rounds", Column("planned", JSON_))
    rounds = table("rounds", column("campaign_id"), column("number"), column("planned", JSON_))
    op.execute(update(rounds).values(planned={}))
    assignments = table(
        "assignments", column("campaign_id"), column("round_number"), column("device_key")
    )
    query = select(*assignments.c, func.count().label("total")).group_by(*assignments.c)
    planned: dict[tuple[str, int], dict[str, int]] = defaultdict(dict)
    for row in op.get_bind().execute(query):
        planned[row.campaign_id, row.round_number][row.device_key] = row.total
    for (campaign_id, number), counts in planned.items():
        part = rounds.c.campaign_id == campaign_id, rounds.c.number == number
        op.execute(update(rounds).where(*part).values(planned=counts))
    with op.batch_alter_table("rounds") as batch:
        batch.alter_column("planned", existing_type=JSON_, nullable=False)


def _change_assignments() -> None:
    """Add losses and hosts; leases have no known host, so they are released."""
    op.drop_index("ix_assignments_campaign_id_device_key_state_round_number_rank", "assignments")
    op.add_column("assignments", Column("losses", Integer))
    op.add_column("assignments", Column("host", String(255)))
    op.execute("UPDATE assignments SET losses = 0")
    op.execute("UPDATE assignments SET state = 'open', worker = NULL WHERE state = 'leased'")
    with op.batch_alter_table("assignments") as batch:
        batch.alter_column("losses", existing_type=Integer, nullable=False)
        batch.drop_constraint("ck_assignments_attempts", type_="check")
        batch.create_check_constraint(
            "ck_assignments_host", "(host IS NOT NULL) = (worker IS NOT NULL)"
        )
        batch.create_check_constraint("ck_assignments_counts", "failures >= 0 AND losses >= 0")
        batch.create_check_constraint("ck_assignments_attempts", "failures + losses <= attempts")
    op.create_index(
        "ix_assignments_campaign_id_state_device_key",
        "assignments",
        ["campaign_id", "state", "device_key"],
    )
