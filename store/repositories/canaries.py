"""Readings of the canary: what the same step cost on a device, time after time.

Every reading is kept, so that the reference of a device, the median of its first
readings, and its drift since then can be read back by every later campaign.
"""

from __future__ import annotations

import dataclasses

from sqlalchemy import select
from sqlalchemy.orm import Session

from trappm.profiler.measuring.canary import CanaryReading
from trappm.store.db.engine import insert_new
from trappm.store.db.models import CanaryRow, ConfigurationRow
from trappm.store.db.transactions import Repository, reading, writing
from trappm.store.repositories.workloads import configuration_of, insert_configurations

_PLAIN = tuple(
    field.name for field in dataclasses.fields(CanaryReading) if field.name != "configuration"
)
"""What a column of the same name holds."""


class Canaries(Repository):
    """Readings of the canary, of every device and host."""

    @writing
    def save(
        self, session: Session, reading: CanaryReading, *, campaign_id: str | None = None
    ) -> None:
        """Keeps a reading; the same attempt key twice changes nothing.

        Args:
            campaign_id: the campaign whose worker took it; must be there.

        Raises:
            StoreError: the store cannot be written, or there is no such campaign.
        """
        values = {name: getattr(reading, name) for name in _PLAIN}
        insert_configurations(session, [reading.configuration])
        row = values | {
            "configuration_id": reading.configuration.id,
            "campaign_id": campaign_id,
        }
        insert_new(session, CanaryRow, [row])

    @reading
    def all(
        self, session: Session, *, device: str | None = None, campaign_id: str | None = None
    ) -> list[CanaryReading]:
        """Readings of a device (on any host, under any stack), or of a campaign, oldest first."""
        query = (
            select(CanaryRow, ConfigurationRow)
            .join(ConfigurationRow, ConfigurationRow.id == CanaryRow.configuration_id)
            .order_by(CanaryRow.taken_at, CanaryRow.id)
        )
        if device is not None:
            query = query.where(CanaryRow.device == device)
        if campaign_id is not None:
            query = query.where(CanaryRow.campaign_id == campaign_id)
        return [
            CanaryReading(
                configuration=configuration_of(what),
                **{name: getattr(row, name) for name in _PLAIN},
            )
            for row, what in session.execute(query)
        ]
