"""The label store: what campaigns plan and measure, in SQL, and the data folder.

All SQL is in this package. It returns frozen records or tables, never rows. `Store` opens a
database and gives access to its parts, one for each subject (`store.campaigns`, `store.labels`
...). SQLAlchemy is imported when a name that needs it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trappm.store.home import Home, StoreAccess
from trappm.store.label_filter import LabelFilter
from trappm.store.records import (
    Assignment,
    AssignmentState,
    CampaignRecord,
    CampaignState,
    LabelRecord,
    Owner,
    OwnerProcess,
    PoolPart,
)

if TYPE_CHECKING:
    from trappm.store.engine import NoLabelStoreError, RefusedRowError, StoreNotUpError
    from trappm.store.owners import NotOwnerError
    from trappm.store.store import Store
    from trappm.store.transactions import Patience

__all__ = [
    "Assignment", "AssignmentState", "CampaignRecord", "CampaignState", "Home", "LabelFilter",
    "LabelRecord", "NoLabelStoreError", "NotOwnerError", "Owner", "OwnerProcess", "Patience",
    "PoolPart", "RefusedRowError", "Store", "StoreAccess", "StoreNotUpError",
]  # fmt: skip

_MODULES = {
    "NoLabelStoreError": "engine",
    "NotOwnerError": "owners",
    "Patience": "transactions",
    "RefusedRowError": "engine",
    "Store": "store",
    "StoreNotUpError": "engine",
}
"""Modules of the names that need SQLAlchemy."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"trappm.store.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'trappm.store' has no attribute {name!r}")
