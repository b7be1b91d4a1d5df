"""Indices for the questions that people ask: by family, by time, by outcome, by size of a graph.

Revision ID: 0005
Revises: 0004
"""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_INDICES = (
    ("ix_configurations_family_architecture", "configurations", ["family", "architecture"]),
    ("ix_graphs_node_count", "graphs", ["node_count"]),
    ("ix_labels_created_at", "labels", ["created_at"]),
    ("ix_measurements_outcome", "measurements", ["outcome"]),
    ("ix_measurements_started_at", "measurements", ["started_at"]),
)


def upgrade() -> None:
    for name, table, columns in _INDICES:
        op.create_index(name, table, columns)
    op.drop_index("ix_configurations_family", "configurations")
