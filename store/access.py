"""How this process reaches the label store, for another process that is to reach it the same way.

A password may stand in the database's URL or in what libpq reads: PGPASSWORD, and the files that
PGPASSFILE and others name. Ray shows the environments of actors in its state, its logs and in
process lists, and their arguments nowhere: so this travels as an argument, and prints as nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from trappm.store.home import Home

LIBPQ = "PG"
"""Begins the names of libpq's environment variables."""


@dataclass(frozen=True, repr=False)
class StoreAccess:
    """A label store's URL, and libpq's variables beside it where that is PostgreSQL."""

    url: str
    variables: Mapping[str, str]

    @classmethod
    def of(cls, home: Home) -> Self:
        """How this process, which has the data folder, reaches its store."""
        url = home.database_url
        return cls(url, _libpq_variables() if url.startswith("postgresql") else {})

    def take_over(self) -> str:
        """Puts the variables into this process's environment, instead of its own; the URL."""
        for name in _libpq_variables():
            del os.environ[name]
        os.environ.update(self.variables)
        return self.url


def _libpq_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(LIBPQ)}
