"""`store.maintenance`: the store looks at itself, and mends its labels."""

from __future__ import annotations

from sqlalchemy import Connection
from sqlalchemy.orm import Session

from trappm.store.db.engine import back_end
from trappm.store.db.transactions import Repository, reading, writing
from trappm.store.maintenance.check import find_faults
from trappm.store.maintenance.findings import Finding
from trappm.store.maintenance.repair import Relabelled, relabel
from trappm.store.maintenance.stats import Stats, stats_of


class Maintenance(Repository):
    """Checks, repairs and statistics of a store as a whole."""

    @reading
    def check(self, session: Session) -> list[Finding]:
        """Everything in the database that cannot be true; changes nothing.

        Raises:
            StoreError: the database cannot be read.
        """
        return find_faults(_at_one_time(session))

    @reading
    def stats(self, session: Session) -> Stats:
        """Counts of rows, sizes and times of the store.

        Raises:
            StoreError: the database cannot be read.
        """
        return stats_of(_at_one_time(session))

    @writing
    def relabel(self, session: Session) -> Relabelled:
        """Makes labels that are wrong or lost again from what was measured, all or nothing.

        A label that was wrong keeps its id, and assignments that ended with it keep it; one that no
        measurement supports is gone. Labels that are right are left as they are.

        Raises:
            StoreError: the database refused; nothing was changed.
        """
        return relabel(session)


def _at_one_time(session: Session) -> Connection:
    """A connection whose every query sees the same moment: a campaign may write meanwhile."""
    if back_end(session) == "sqlite":
        return session.connection()
    return session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
