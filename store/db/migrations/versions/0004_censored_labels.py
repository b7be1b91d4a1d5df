"""Labels that only know a bound of the memory; the phases of a step in measurements."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
SHARES = ("step_forward_share", "step_backward_share", "step_optimizer_share")
BOUND = "memory_above_mib"
CHECKS = {
    "ck_labels_some_metric": "step_time_ms IS NOT NULL OR memory_mib IS NOT NULL"
    " OR power_w IS NOT NULL OR memory_above_mib IS NOT NULL",
    "ck_labels_memory_above_mib_positive": "memory_above_mib > 0",
    "ck_labels_value_or_bound": "memory_mib IS NULL OR memory_above_mib IS NULL",
}


def upgrade() -> None:
    for name in SHARES:
        op.add_column("measurements", sa.Column(name, sa.Double(), nullable=True))
    if op.get_bind().dialect.name == "sqlite":
        _make_labels_anew()
    else:
        op.add_column("labels", sa.Column(BOUND, sa.Double(), nullable=True))
        op.drop_constraint(op.f("ck_labels_some_metric"), "labels", type_="check")
        for name, condition in CHECKS.items():
            op.create_check_constraint(op.f(name), "labels", condition)


def _make_labels_anew() -> None:
    """SQLite changes no constraint; and no table goes while rows of another one refer to it."""
    op.execute("CREATE TEMPORARY TABLE kept AS SELECT * FROM assignment_labels")
    op.execute("DELETE FROM assignment_labels")
    made = op.create_table(
        "labels_0004",
        sa.Column("id", BIG, nullable=False),
        sa.Column("configuration_id", sa.String(length=20), nullable=False),
        sa.Column("device_id", sa.Integer(), nullable=False),
        sa.Column("protocol_name", sa.String(length=64), nullable=False),
        sa.Column("measurement_id", BIG, nullable=False),
        sa.Column("provenance", sa.String(length=16), nullable=False),
        sa.Column("step_time_ms", sa.Double(), nullable=True),
        sa.Column("memory_mib", sa.Double(), nullable=True),
        sa.Column(BOUND, sa.Double(), nullable=True),
        sa.Column("power_w", sa.Double(), nullable=True),
        sa.Column("energy_j", sa.Double(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint(
            "provenance IN ('measured', 'imported', 'simulated')", name=op.f("ck_labels_provenance")
        ),
        *(
            sa.CheckConstraint(f"{name} > 0", name=op.f(f"ck_labels_{name}_positive"))
            for name in ("step_time_ms", "memory_mib", "power_w", "energy_j")
        ),
        *(sa.CheckConstraint(condition, name=op.f(name)) for name, condition in CHECKS.items()),
        *(
            sa.ForeignKeyConstraint([f"{one}_id"], [f"{one}s.id"], name=op.f(f"fk_labels_{one}_id"))
            for one in ("configuration", "device", "measurement")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_labels")),
        sa.UniqueConstraint(
            "configuration_id", "device_id", "protocol_name",
            name=op.f("uq_labels_configuration_id_device_id_protocol_name"),
        ),
        sa.UniqueConstraint("measurement_id", name=op.f("uq_labels_measurement_id")),
    )  # fmt: skip
    columns = ", ".join(column.name for column in made.columns if column.name != BOUND)
    op.execute(f"INSERT INTO labels_0004 ({columns}) SELECT {columns} FROM labels")  # noqa: S608
    op.drop_table("labels")
    op.rename_table("labels_0004", "labels")
    op.create_index(op.f("ix_labels_device_id"), "labels", ["device_id"])
    op.execute("INSERT INTO assignment_labels SELECT * FROM kept")
    op.execute("DROP TABLE kept")
