"""The names that the store knows, and the nearest one for a name that it does not know.

Names are read from an index one after the other ("skip scan"), so that listing the thousand
architectures of a million configurations reads a thousand entries.
"""

from __future__ import annotations

import fnmatch

from sqlalchemy import func, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from trappm.store.db.models import ConfigurationRow


def known_names(session: Session, column: InstrumentedAttribute[str]) -> list[str]:
    """All values of a column, each once, sorted as the database sorts; quick if it is indexed."""
    names = select(func.min(column).label("name")).cte("names", recursive=True)
    following = select(func.min(column)).where(column > names.c.name).scalar_subquery()
    names = names.union_all(select(following).where(names.c.name.is_not(None)))
    return list(session.scalars(select(names.c.name).where(names.c.name.is_not(None))))


def architectures_matching(session: Session, pattern: str) -> list[str]:
    """The architectures of this name or glob.

    A glob is matched here, so that it means the same as in a pool on every back end, and `%` or `_`
    mean themselves.
    """
    if not is_glob(pattern):
        return [pattern]
    known = known_names(session, ConfigurationRow.architecture)
    return [name for name in known if fnmatch.fnmatchcase(name, pattern)]


def is_glob(pattern: str) -> bool:
    return bool(set(pattern) & set("*?["))
