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
_DATABASE_FILE = "database_url"
_LONGEST_URL = 4096


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
        if (named := self._named_url()) is not None:
            return named
        from sqlalchemy import URL  # it takes a tenth of a second to import

        return URL.create("sqlite", database=str(self.database_path)).render_as_string()

    @property
    def database_files(self) -> tuple[Path, ...] | None:
        """Files of a SQLite store, which change whenever it changes; None for another database.

        The write-ahead log is omitted while it is empty, because readers create and delete it.

        Raises:
            InputError: As `database_url`.
            OSError: The log cannot be accessed.
        """
        if self._named_url() is not None:
            return None
        log = self.database_path.with_name(self.database_path.name + "-wal")
        try:
            is_used = log.stat().st_size > 0
        except FileNotFoundError:
            is_used = False
        return (self.database_path, log) if is_used else (self.database_path,)

    def _named_url(self) -> str | None:
        """URL of a database other than the file in the folder, if one is named."""
        return os.environ.get(DATABASE_VARIABLE) or self._url_in_folder()

    def _url_in_folder(self) -> str | None:
        path = self.path / _DATABASE_FILE
        try:
            with path.open(encoding="utf-8") as file:
                lines = file.read(_LONGEST_URL + 1).strip().splitlines()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise InputError(f"{path} cannot be read: {reason}") from error
        if len(lines) != 1 or len(lines[0]) > _LONGEST_URL:  # it may hold a password
            raise InputError(
                f"{path} must hold one line, the SQLAlchemy URL of the label store, such as "
                "postgresql+psycopg://user@host/labels"
            )
        return lines[0]

    @property
    def snapshots(self) -> Path:
        return self.path / "snapshots"

    @property
    def step_profiles(self) -> Path:
        """Cache of traced steps; it can be deleted."""
        return self.path / "step_profiles"

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
        except (FileExistsError, NotADirectoryError) as error:
            raise InputError(
                f"the data folder {home.path} cannot be used: {error.filename} is not a folder; "
                f"set {VARIABLE} to a folder you may write to"
            ) from error
        except OSError as error:
            raise InputError(
                f"the data folder {home.path} cannot be written to ({error.strerror}); "
                f"set {VARIABLE} to a folder you may write to"
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
        return cls(url, _libpq_variables() if url.startswith("postgresql") else {})

    def take_over(self) -> str:
        """Replace libpq's variables of this process, and return the URL."""
        for name in _libpq_variables():
            del os.environ[name]
        os.environ.update(self.variables)
        return self.url


def _libpq_variables() -> dict[str, str]:
    """Return the variables that libpq reads, such as PGPASSWORD and PGPASSFILE."""
    return {name: value for name, value in os.environ.items() if name.startswith("PG")}
