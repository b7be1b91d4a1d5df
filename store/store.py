"""The door of the label store."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from trappm.store import sql
from trappm.store.assignments import Assignments
from trappm.store.campaigns import Campaigns, Rounds, Snapshots
from trappm.store.engine import address, engine_to_read, make_engine
from trappm.store.kernel_measurements import Kernels
from trappm.store.labels import Labels
from trappm.store.measurements import Canaries, Measurements
from trappm.store.migrate import find_damage, require_newest, schema_of, upgrade
from trappm.store.owners import Owners, owner_guard
from trappm.store.transactions import IMPATIENT, Database, Patience
from trappm.store.workloads import Pools, Workloads

if TYPE_CHECKING:
    import pandas as pd


class Store:
    """The label store, in parts: `store.campaigns`, `store.measurements`, `store.labels` ...

    Each method of a part is one transaction, and returns plain records. Any number of processes may
    have the same store open. Every method raises StoreError when the database refuses; nothing is
    half done then. While the database is away it waits, as `Patience` says.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        self.workloads = Workloads(database)
        self.pools = Pools(database)
        self.campaigns = Campaigns(database)
        self.rounds = Rounds(database)
        self.owners = Owners(database)
        self.assignments = Assignments(database)
        self.measurements = Measurements(database)
        self.labels = Labels(database)
        self.canaries = Canaries(database)
        self.kernels = Kernels(database)
        self.snapshots = Snapshots(database)

    @classmethod
    def open(cls, url: str, patience: Patience | None = None) -> Self:
        """Opens the label store at an SQLAlchemy URL, and makes one in an empty database.

        A store of an older schema is not upgraded here; see `store.migrate.upgrade_store`.

        Args:
            url: of the database.
            patience: for how long each method waits for a database that has gone away since then.

        Raises:
            StoreAccessError: it is no database, not ours, of another schema than this version's, or
                not writable.
        """
        engine = make_engine(url)
        try:
            if schema_of(engine) is None:
                upgrade(engine)
            require_newest(engine)
        except BaseException:
            engine.dispose()
            raise
        return cls(Database(engine, patience or Patience()))

    @classmethod
    def open_to_read(cls, url: str) -> Self:
        """Opens a label store that is there, without the means to change it.

        Raises:
            NoLabelStoreError: there is no such SQLite file, or the database is empty.
            StoreAccessError: it cannot be read, is not ours, or has another schema than this
                version's.
        """
        engine = engine_to_read(url)
        try:
            require_newest(engine)
        except BaseException:
            engine.dispose()
            raise
        return cls(Database(engine, IMPATIENT))

    def impatient(self) -> Self:
        """The same store, which does not wait for its database."""
        return type(self)(Database(self.database.engine, IMPATIENT, self.database.guard))

    def as_owner(self, campaign_id: str, owner_id: str) -> Self:
        """The same store for this owner: its methods raise NotOwnerError once another has it."""
        guard = owner_guard(campaign_id, owner_id)
        return type(self)(Database(self.database.engine, self.database.patience, guard))

    def query_sql(
        self, statement: str, *, limit: int = sql.MAX_ROWS, timeout_s: float = sql.TIMEOUT_S
    ) -> tuple[pd.DataFrame, bool]:
        """The rows that one reading SQL statement returns, in the dialect of the database.

        Bytes are shown as their number, JSON as text; a second column of one name is `name_2`.

        Args:
            statement: a SELECT or VALUES, with or without WITH.
            limit: rows at most.
            timeout_s: after which it is stopped.

        Returns:
            The table, and whether there were more rows than the limit.

        Raises:
            InputError: the database does not understand the statement, it is none that only
                reads, or it takes too long.
            StoreError: the database cannot be reached.
        """
        url = self.database.engine.url
        return sql.query_sql(url, statement, limit=limit, timeout_s=timeout_s)

    def check(self) -> list[str]:
        """Return what the database reports of its own integrity; empty if nothing is wrong.

        Opening the store has checked its schema.

        Raises:
            StoreError: The database cannot be read.
        """
        return find_damage(self.database.engine)

    @property
    def address(self) -> str:
        """Where the database is, without a password."""
        return address(self.database.engine)

    def close(self) -> None:
        self.database.engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
