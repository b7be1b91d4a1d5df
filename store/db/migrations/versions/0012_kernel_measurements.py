"""Kernel measurements, by which a device is known before its first label.

Revision ID: 0012
Revises: 0011
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
DOCUMENT = sa.JSON(none_as_null=True).with_variant(
    postgresql.JSONB(none_as_null=True), "postgresql"
)
POSITIVE = ("time_ms", "power_w", "energy_j")
TABLE = "kernel_measurements"


def one_of(name: str, *values: str) -> sa.Enum:
    return sa.Enum(*values, name=name, native_enum=False, create_constraint=True, length=16)


def upgrade() -> None:
    op.create_table(
        "kernel_conditions",
        sa.Column("content_hash", sa.String(length=64), nullable=False),
        sa.Column("protocol", DOCUMENT, nullable=False),
        sa.Column("environment", DOCUMENT, nullable=False),
        sa.PrimaryKeyConstraint("content_hash", name=op.f("pk_kernel_conditions")),
    )
    outcomes = ("ok", "oom", "timeout", "unsupported", "unstable", "error")
    op.create_table(
        TABLE,
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
            "provenance",
            one_of("provenance", "measured", "imported", "simulated"),
            nullable=False,
        ),
        sa.Column("outcome", one_of("outcome", *outcomes), nullable=False),
        sa.Column("failed_in", sa.String(length=16), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("duration_s", sa.Double(), nullable=False),
        sa.Column("samples_ms", sa.LargeBinary(), nullable=False),
        *(sa.Column(name, sa.Double(), nullable=True) for name in ("iqr_ms", *POSITIVE)),
        sa.Column("missing", DOCUMENT, nullable=False),
        sa.Column("facts", DOCUMENT, nullable=False),
        *(
            sa.CheckConstraint(f"{name} > 0", name=op.f(f"ck_{TABLE}_{name}_positive"))
            for name in POSITIVE
        ),
        sa.CheckConstraint("iqr_ms >= 0", name=op.f(f"ck_{TABLE}_iqr_ms")),
        sa.CheckConstraint("duration_s >= 0", name=op.f(f"ck_{TABLE}_duration_s")),
        sa.CheckConstraint(
            "outcome <> 'ok' OR time_ms IS NOT NULL", name=op.f(f"ck_{TABLE}_ok_has_a_time")
        ),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name=op.f(f"fk_{TABLE}_device_id")),
        sa.ForeignKeyConstraint(
            ["conditions_hash"],
            ["kernel_conditions.content_hash"],
            name=op.f(f"fk_{TABLE}_conditions_hash"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f(f"pk_{TABLE}")),
        sa.UniqueConstraint("attempt_key", name=op.f(f"uq_{TABLE}_attempt_key")),
    )
    op.create_index(op.f(f"ix_{TABLE}_call"), TABLE, ["call"])
    op.create_index(op.f(f"ix_{TABLE}_conditions_hash"), TABLE, ["conditions_hash"])
    op.create_index(
        op.f(f"ix_{TABLE}_device_id_operator_outcome"), TABLE, ["device_id", "operator", "outcome"]
    )
