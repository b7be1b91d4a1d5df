"""Readings of the canary, by which a device is compared with itself."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
POSITIVE = ("step_time_ms", "memory_mib", "power_w", "reference_ms")


def one_of(name: str, *values: str) -> sa.Enum:
    return sa.Enum(*values, name=name, native_enum=False, create_constraint=True, length=16)


def upgrade() -> None:
    op.create_table(
        "canaries",
        sa.Column("id", BIG, nullable=False),
        sa.Column("attempt_key", sa.String(length=64), nullable=False),
        sa.Column("taken_at", sa.DateTime(timezone=True), nullable=False),
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
        *(sa.Column(name, sa.Double(), nullable=True) for name in POSITIVE),
        sa.Column("relative_drift", sa.Double(), nullable=True),
        sa.Column("decision", one_of("canarydecision", "ok", "drifting", "stop"), nullable=False),
        sa.Column("message", sa.Text(), nullable=True),
        *(
            sa.CheckConstraint(f"{name} > 0", name=op.f(f"ck_canaries_{name}_positive"))
            for name in POSITIVE
        ),
        sa.CheckConstraint(
            "step_time_ms IS NULL OR outcome = 'ok'", name=op.f("ck_canaries_step_time")
        ),
        sa.CheckConstraint(
            "(message IS NULL) = (decision = 'ok')", name=op.f("ck_canaries_message")
        ),
        *(
            sa.ForeignKeyConstraint(
                [f"{one}_id"], [f"{one}s.id"], name=op.f(f"fk_canaries_{one}_id")
            )
            for one in ("configuration", "campaign")
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
