"""A label says how its measurement ended, `ok` or out of memory, and refers to it with that.

So the database itself refuses a label of an attempt that failed, whoever writes. A label of before
that has no such measurement behind it goes; `trappm store mend` makes those again that have another
one. Measurements are not touched.

Revision ID: 0008
Revises: 0007
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
METRICS = ("step_time_ms", "memory_mib", "memory_above_mib", "power_w", "energy_j")
FIRST = ("id", "configuration_id", "device_id", "protocol_name", "measurement_id")
CHECKS = {
    "ck_labels_outcome": "outcome IN ('ok', 'oom', 'timeout', 'unsupported', 'unstable', 'error')",
    "ck_labels_ok_or_censored": "(outcome = 'ok' AND memory_above_mib IS NULL)"
    " OR (outcome = 'oom' AND memory_above_mib IS NOT NULL)",
}
BEHIND = (
    "SELECT outcome FROM measurements WHERE measurements.id = labels.measurement_id"
    " AND outcome = CASE WHEN labels.memory_above_mib IS NULL THEN 'ok' ELSE 'oom' END"
)
UNSUPPORTED = f"SELECT id FROM labels WHERE NOT EXISTS ({BEHIND})"  # noqa: S608


def upgrade() -> None:
    op.create_index("ix_measurements_outcome_id", "measurements", ["outcome", "id"], unique=True)
    op.drop_index("ix_measurements_outcome", "measurements")
    op.execute(f"DELETE FROM assignment_labels WHERE label_id IN ({UNSUPPORTED})")  # noqa: S608
    op.execute(f"DELETE FROM labels WHERE id IN ({UNSUPPORTED})")  # noqa: S608
    if op.get_bind().dialect.name == "sqlite":
        _make_labels_anew()
        return
    op.add_column("labels", sa.Column("outcome", sa.String(length=16), nullable=True))
    op.execute(f"UPDATE labels SET outcome = ({BEHIND})")  # noqa: S608
    op.alter_column("labels", "outcome", nullable=False)
    for name, condition in CHECKS.items():
        op.create_check_constraint(op.f(name), "labels", condition)
    op.drop_constraint("fk_labels_measurement_id", "labels", type_="foreignkey")
    op.create_foreign_key(
        op.f("fk_labels_measurement_id"), "labels", "measurements",
        ["measurement_id", "outcome"], ["id", "outcome"],
    )  # fmt: skip


def _make_labels_anew() -> None:
    """SQLite changes no constraint; and no table goes while rows of another one refer to it."""
    op.execute("CREATE TEMPORARY TABLE kept AS SELECT * FROM assignment_labels")
    op.execute("DELETE FROM assignment_labels")
    op.create_table(
        "labels_0008",
        sa.Column("id", BIG, nullable=False),
        sa.Column("configuration_id", sa.String(length=20), nullable=False),
        sa.Column("device_id", sa.Integer(), nullable=False),
        sa.Column("protocol_name", sa.String(length=64), nullable=False),
        sa.Column("measurement_id", BIG, nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=False),
        sa.Column("provenance", sa.String(length=16), nullable=False),
        *(sa.Column(name, sa.Double(), nullable=True) for name in METRICS),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint(
            "provenance IN ('measured', 'imported', 'simulated')", name=op.f("ck_labels_provenance")
        ),
        *(
            sa.CheckConstraint(f"{name} > 0", name=op.f(f"ck_labels_{name}_positive"))
            for name in METRICS
        ),
        sa.CheckConstraint(
            "step_time_ms IS NOT NULL OR memory_mib IS NOT NULL"
            " OR power_w IS NOT NULL OR memory_above_mib IS NOT NULL",
            name=op.f("ck_labels_some_metric"),
        ),
        sa.CheckConstraint(
            "memory_mib IS NULL OR memory_above_mib IS NULL", name=op.f("ck_labels_value_or_bound")
        ),
        *(sa.CheckConstraint(condition, name=op.f(name)) for name, condition in CHECKS.items()),
        *(
            sa.ForeignKeyConstraint([f"{one}_id"], [f"{one}s.id"], name=op.f(f"fk_labels_{one}_id"))
            for one in ("configuration", "device")
        ),
        sa.ForeignKeyConstraint(
            ["measurement_id", "outcome"],
            ["measurements.id", "measurements.outcome"],
            name=op.f("fk_labels_measurement_id"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_labels")),
        sa.UniqueConstraint(
            "configuration_id", "device_id", "protocol_name",
            name=op.f("uq_labels_configuration_id_device_id_protocol_name"),
        ),
        sa.UniqueConstraint("measurement_id", name=op.f("uq_labels_measurement_id")),
    )  # fmt: skip
    columns = ", ".join([*FIRST, "provenance", *METRICS, "created_at"])
    op.execute(
        f"INSERT INTO labels_0008 ({columns}, outcome)"  # noqa: S608
        f" SELECT {columns}, ({BEHIND}) FROM labels"
    )
    op.drop_table("labels")
    op.rename_table("labels_0008", "labels")
    op.create_index(op.f("ix_labels_device_id"), "labels", ["device_id"])
    op.create_index("ix_labels_created_at", "labels", ["created_at"])
    op.execute("INSERT INTO assignment_labels SELECT * FROM kept")
    op.execute("DROP TABLE kept")
