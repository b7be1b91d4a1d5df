"""The label store: opening a database, and its parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from trappm.store import sql
from trappm.store.assignments import Assignments
from trappm.store.campaigns import CampaignRounds, Campaigns
from trappm.store.engine import (
    NoLabelStoreError,
    address,
    engine_to_read,
    find_damage,
    make_engine,
)
from trappm.store.labels import Labels
from trappm.store.measurements import Canaries, Measurements
from trappm.store.migrate import has_tables, upgrade
from trappm.store.owners import Owners, owner_guard
from trappm.store.pools import Pools
from trappm.store.traces import SqlTraces
from trappm.store.transactions import IMPATIENT, Database, Patience

if TYPE_CHECKING:
    import pandas as pd
    from sqlalchemy import Engine


class Store:
    """The label store, in parts: `store.campaigns`, `store.measurements`, `store.labels` ...

    >>> with Store.open("sqlite:///labels.db") as store:
    ...     campaign = store.campaigns.create("mine", {"rounds": {"count": 3}}, seed=1)
    ...     store.campaigns.state(campaign.id)
    <CampaignState.PAUSED: 'paused'>

    Each method of a part is one transaction and returns plain records. It raises StoreError if the
    database refuses, and leaves nothing half done. While the database is away it waits, as
    `Patience` says. Any number of processes may have the same store open.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        self.traces = SqlTraces(database)
        self.pools = Pools(database)
        self.campaigns = Campaigns(database)
        self.rounds = CampaignRounds(database)
        self.owners = Owners(database)
        self.assignments = Assignments(database)
        self.measurements = Measurements(database)
        self.labels = Labels(database)
        self.canaries = Canaries(database)

    @classmethod
    def open(cls, url: str, patience: Patience | None = None) -> Self:
        """Open the label store at an SQLAlchemy URL; an empty database becomes a label store.

        Raises:
            StoreAccessError: It is not a database or not a label store of this version, or is not
                writable.
        """
        engine = make_engine(url)
        with _dispose_on_error(engine):
            if not has_tables(engine):
                upgrade(engine)
        return cls(Database(engine, patience or Patience()))

    @classmethod
    def open_to_read(cls, url: str) -> Self:
        """Open an existing label store without the means to change it.

        Raises:
            NoLabelStoreError: There is no such SQLite file, or the database is empty.
            StoreAccessError: It cannot be read, or is not a label store of this version.
        """
        engine = engine_to_read(url)
        with _dispose_on_error(engine):
            if not has_tables(engine):
                raise NoLabelStoreError(
                    f"{address(engine)} is an empty database, not yet a label store; make it one "
                    "with: trappm store upgrade"
                )
        return cls(Database(engine, IMPATIENT))

    @staticmethod
    def upgrade(url: str) -> str | None:
        """Upgrade the label store at an SQLAlchemy URL, as `migrate.upgrade` does.

        Returns:
            The schema before; None if the database was empty.

        Raises:
            NoLabelStoreError: There is no such SQLite file.
            StoreAccessError: It is not a label store that can be upgraded, or is not writable.
        """
        engine_to_read(url).dispose()  # refuses a file that does not exist
        engine = make_engine(url)
        try:
            return upgrade(engine)
        finally:
            engine.dispose()

    def impatient(self) -> Self:
        """Return the same store, which does not wait for its database."""
        return type(self)(Database(self.database.engine, IMPATIENT, self.database.guard))

    def as_owner(self, campaign_id: str, owner_id: str) -> Self:
        """Return the store of a campaign's owner, which refuses to write after it is replaced.

        Its methods raise NotOwnerError then.
        """
        guard = owner_guard(campaign_id, owner_id)
        return type(self)(Database(self.database.engine, self.database.patience, guard))

    def query_sql(
        self, statement: str, *, limit: int = sql.MAX_ROWS, timeout_s: float = sql.TIMEOUT_S
    ) -> tuple[pd.DataFrame, bool]:
        """Return `sql.query_sql` of this store."""
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
        """Address of the database, without a password."""
        return address(self.database.engine)

    def close(self) -> None:
        self.database.engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _dispose_on_error(engine: Engine) -> Iterator[None]:
    try:
        yield
    except BaseException:
        engine.dispose()
        raise
