"""What a training step of each architecture does to memory."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
COUNTS = (
    "saved_bytes_constant",
    "saved_bytes_per_sample",
    "trainable_parameters",
    "frozen_parameters",
)


def upgrade() -> None:
    op.create_table(
        "step_profiles",
        sa.Column("architecture", sa.String(length=200), nullable=False),
        sa.Column("input_size", sa.Integer(), nullable=False),
        sa.Column("profile", sa.LargeBinary(), nullable=True),
        *(sa.Column(name, BIG, nullable=True) for name in COUNTS),
        sa.Column("refusal", sa.Text(), nullable=True),
        sa.CheckConstraint(
            "(profile IS NULL) <> (refusal IS NULL)",
            name=op.f("ck_step_profiles_profile_or_refusal"),
        ),
        *(
            sa.CheckConstraint(
                f"({name} IS NULL) = (profile IS NULL)", name=op.f(f"ck_step_profiles_{name}")
            )
            for name in COUNTS
        ),
        sa.PrimaryKeyConstraint("architecture", "input_size", name=op.f("pk_step_profiles")),
    )
