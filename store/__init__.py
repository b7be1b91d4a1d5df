"""The label store: everything a campaign knows, in SQL, and the data folder that it stands in.

This is the only room with SQL in it. What comes out of it is frozen records or tables, never rows.
`store.Store` is the door to parts: `repositories` (one subject each), `query` (filters, tables,
SQL), `exchange` (files of measurements), `maintenance` (check, repair, backups, upgrades). `db`
holds the engine, transactions, tables and migrations. Importing this is quick: SQLAlchemy loads
when a part is asked for that needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trappm.store.access import StoreAccess
    from trappm.store.db.read_only import NoLabelStoreError
    from trappm.store.db.retry import Patience, RefusedRowError, StoreNotUpError
    from trappm.store.home import Home
    from trappm.store.query.filters import LabelFilter
    from trappm.store.records import (
        Assignment,
        AssignmentState,
        CampaignRecord,
        CampaignState,
        EventRecord,
        LabelRecord,
        Owner,
        OwnerProcess,
        PlannedAssignment,
        PoolPart,
        PoolRecord,
        Purpose,
        Recorded,
        Refusal,
        Role,
        RoundRecord,
        RoundState,
        SnapshotRecord,
    )
    from trappm.store.repositories.owners import NotOwnerError
    from trappm.store.store import Store

__all__ = [
    "Assignment",
    "AssignmentState",
    "CampaignRecord",
    "CampaignState",
    "EventRecord",
    "Home",
    "LabelFilter",
    "LabelRecord",
    "NoLabelStoreError",
    "NotOwnerError",
    "Owner",
    "OwnerProcess",
    "Patience",
    "PlannedAssignment",
    "PoolPart",
    "PoolRecord",
    "Purpose",
    "Recorded",
    "Refusal",
    "RefusedRowError",
    "Role",
    "RoundRecord",
    "RoundState",
    "SnapshotRecord",
    "Store",
    "StoreAccess",
    "StoreNotUpError",
]

_ELSEWHERE = {
    "Home": "trappm.store.home",
    "LabelFilter": "trappm.store.query.filters",
    "NoLabelStoreError": "trappm.store.db.read_only",
    "NotOwnerError": "trappm.store.repositories.owners",
    "Patience": "trappm.store.db.retry",
    "RefusedRowError": "trappm.store.db.retry",
    "Store": "trappm.store.store",
    "StoreAccess": "trappm.store.access",
    "StoreNotUpError": "trappm.store.db.retry",
}
"""Where those of `__all__` live that are no records."""


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(_ELSEWHERE.get(name, "trappm.store.records")), name)
    raise AttributeError(f"module 'trappm.store' has no attribute {name!r}")
