"""Step profiles say which version of the recorder made them, so that older ones are made anew.

Revision ID: 0011
Revises: 0010
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "step_profiles",
        sa.Column("trace_version", sa.Integer(), nullable=False, server_default="1"),
    )
