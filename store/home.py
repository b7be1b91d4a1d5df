"""The data folder, and the address of the label store.

The label store is a SQLite file in the data folder unless another database is named. Several
machines share a PostgreSQL database.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from trappm.profiler.errors import InputError
from trappm.profiler.host.environment import VARIABLE, data_folder

DATABASE_VARIABLE = "TRAPPM_DATABASE"


@dataclass(frozen=True)
class Home:
    """A data folder by its absolute path."""

    path: Path

    @property
    def database_path(self) -> Path:
        return self.path / "labels.db"

    @property
    def database_url(self) -> str:
        """SQLAlchemy URL of the label store.

        TRAPPM_DATABASE comes first, then the line in the folder's file `database_url`, then
        `labels.db` in the folder.

        Raises:
            InputError: The file cannot be read, or does not hold exactly one line.
        """
        if named := os.environ.get(DATABASE_VARIABLE) or self._url_in_folder():
            return named
        from sqlalchemy import URL  # it takes a tenth of a second to import

        return URL.create("sqlite", database=str(self.database_path)).render_as_string()

    def _url_in_folder(self) -> str | None:
        path = self.path / "database_url"
        try:
            lines = path.read_text("utf-8").strip().splitlines()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise InputError(f"{path} cannot be read: {reason}") from error
        if len(lines) != 1:  # it may hold a password
            raise InputError(
                f"{path} must hold one line, the SQLAlchemy URL of the label store, such as "
                "postgresql+psycopg://user@host/labels"
            )
        return lines[0]

    @property
    def snapshots(self) -> Path:
        return self.path / "snapshots"

    @property
    def traces(self) -> Path:
        """Cache of traced steps; it can be deleted."""
        return self.path / "traces"

    @property
    def campaigns(self) -> Path:
        """Folder with one folder per campaign, named by its id."""
        return self.path / "campaigns"

    @classmethod
    def find(cls) -> Self:
        """Return the folder that TRAPPM_HOME names, or the user's data folder; it may not exist."""
        return cls(data_folder())

    @classmethod
    def open(cls) -> Self:
        """Return the same folder, and create it if it is missing.

        Raises:
            InputError: It is not a folder, or cannot be created or written to.
        """
        home = cls.find()
        try:
            for folder in (home.path, home.snapshots, home.campaigns):
                folder.mkdir(parents=True, exist_ok=True)
            # Permission bits do not show read-only mounts, so a file is written.
            tempfile.TemporaryFile(dir=home.path).close()
        except OSError as error:
            raise InputError(
                f"the data folder {home.path} cannot be written to ({error.strerror}: "
                f"{error.filename}); set {VARIABLE} to a folder you may write to"
            ) from error
        return home


@dataclass(frozen=True, repr=False)
class StoreAccess:
    """The URL of a label store and libpq's environment variables, for a process elsewhere.

    Both may hold a password. Ray shows the environments of actors, but not their arguments. So an
    instance travels as an argument, and its `repr` shows nothing.
    """

    url: str
    variables: Mapping[str, str]

    @classmethod
    def of(cls, home: Home) -> Self:
        """Return how this process reaches the store of a data folder."""
        url = home.database_url
        return cls(url, _libpq_variables() if url.startswith("postgres") else {})

    def take_over(self) -> str:
        """Replace libpq's variables of this process, and return the URL."""
        for name in _libpq_variables():
            del os.environ[name]
        os.environ.update(self.variables)
        return self.url


def _libpq_variables() -> dict[str, str]:
    """Return the variables that libpq reads, such as PGPASSWORD and PGPASSFILE."""
    return {name: value for name, value in os.environ.items() if name.startswith("PG")}
