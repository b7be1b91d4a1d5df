"""The index of families tells batch and input size too, so that fewer configurations are read.

Revision ID: 0007
Revises: 0006
"""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index(
        "ix_configurations_family_architecture_batch_size_input_size",
        "configurations",
        ["family", "architecture", "batch_size", "input_size"],
    )
    op.drop_index("ix_configurations_family_architecture", "configurations")
