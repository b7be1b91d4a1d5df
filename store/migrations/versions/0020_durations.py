"""Index of the durations of a campaign's attempts by device."""

from __future__ import annotations

from alembic import op

revision = "0020"
down_revision = "0019"


def upgrade() -> None:
    columns = ["campaign_id", "device_id", "duration_s"]
    op.create_index(f"ix_measurements_{'_'.join(columns)}", "measurements", columns)
