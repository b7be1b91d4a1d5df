"""The label store: everything a campaign knows, in SQL, and the data folder that it stands in.

This is the only room with SQL in it. What comes out of it is frozen records, never rows. `store` is
the door, made of one file for each thing that is asked of it: graphs, pools, campaigns, owners,
leases, recording, canaries, labels, asking, snapshots. `schema` says what is true of the data,
`migrations` how older data gets there.
"""

from trappm.store.access import StoreAccess
from trappm.store.db.read_only import NoLabelStoreError
from trappm.store.db.retry import Patience, StoreNotUpError
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
    "Role",
    "RoundRecord",
    "RoundState",
    "SnapshotRecord",
    "Store",
    "StoreAccess",
    "StoreNotUpError",
]
