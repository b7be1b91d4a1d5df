"""The door of the label store."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from trappm.store.db.engine import address, make_engine
from trappm.store.db.migrate import require_newest, schema_of, upgrade
from trappm.store.db.read_only import engine_to_read
from trappm.store.db.retry import IMPATIENT, Patience, in_parts
from trappm.store.maintenance.check import Checks
from trappm.store.maintenance.repair import Relabelling
from trappm.store.maintenance.stats import Statistics
from trappm.store.query.sql import Sql
from trappm.store.query.tables import Asking
from trappm.store.repositories.campaigns import Campaigns
from trappm.store.repositories.canaries import Canaries
from trappm.store.repositories.labels import Labels
from trappm.store.repositories.leases import Leases
from trappm.store.repositories.measurements import Recording
from trappm.store.repositories.owners import Owners
from trappm.store.repositories.pools import Pools
from trappm.store.repositories.snapshots import Snapshots
from trappm.store.repositories.workloads import Workloads


class Store(
    Workloads,
    Pools,
    Campaigns,
    Owners,
    Leases,
    Recording,
    Relabelling,
    Canaries,
    Labels,
    Asking,
    Sql,
    Snapshots,
    Checks,
    Statistics,
):
    """The label store: each method is one transaction, and returns plain records.

    Any number of processes may have the same store open. Every method raises StoreError when the
    database refuses; nothing is half done then. While the database is away it waits, as `Patience`
    says.
    """

    @classmethod
    def open(cls, url: str, patience: Patience | None = None) -> Self:
        """Opens the label store at an SQLAlchemy URL, and makes one in an empty database.

        One of an older schema is not upgraded by the way:
        `store.maintenance.upgrade.upgrade_store` does that, and keeps a copy.

        Args:
            url: of the database.
            patience: for how long each method waits for a database that has gone away since then.

        Raises:
            StoreAccessError: it is no database, not ours, of another schema than this version's, or
                not writable.
        """
        store = cls(make_engine(url), patience or Patience())
        try:
            if schema_of(store._engine) is None:
                upgrade(store._engine, store._writer)
            require_newest(store._engine)
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def open_to_read(cls, url: str) -> Self:
        """Opens a label store that is there, without the means to change it.

        Raises:
            NoLabelStoreError: there is no such SQLite file, or the database is empty.
            StoreAccessError: it cannot be read, is not ours, or has another schema than this
                version's.
        """
        store = cls(engine_to_read(url), IMPATIENT)
        try:
            require_newest(store._engine)
        except BaseException:
            store.close()
            raise
        return store

    @in_parts
    def impatient(self) -> Self:
        """The same store, which does not wait for its database."""
        return type(self)(self._engine, IMPATIENT, self._guard)

    @property
    def address(self) -> str:
        """Where the database is, without a password."""
        return address(self._engine)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
