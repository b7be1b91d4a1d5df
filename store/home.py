"""The data folder: where the label store, snapshots and campaigns' own files live.

The label store is a SQLite file in it, unless another database is named: one that many machines
share is PostgreSQL.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from trappm.profiler.errors import InputError
from trappm.profiler.host.data_folder import VARIABLE, data_folder

DATABASE_VARIABLE = "TRAPPM_DATABASE"
_DATABASE_FILE = "database_url"
_LONGEST_URL = 4096


@dataclass(frozen=True)
class Home:
    """One data folder, by its absolute path; `open` finds and makes it."""

    path: Path

    @property
    def database_path(self) -> Path:
        return self.path / "labels.db"

    @property
    def database_url(self) -> str:
        """The label store's SQLAlchemy URL.

        TRAPPM_DATABASE comes first, then the line in the folder's file `database_url`; without
        either it is `labels.db` in the folder, escaped so that any path can stand in it.

        Raises:
            InputError: that file cannot be read, or holds more or less than one line.
        """
        if (named := self._named_url()) is not None:
            return named
        from sqlalchemy import URL  # it takes a tenth of a second to import

        return URL.create("sqlite", database=str(self.database_path)).render_as_string()

    @property
    def database_files(self) -> tuple[Path, ...] | None:
        """The files that the label store is, which change with it; None where it is elsewhere.

        SQLite writes what is new into the log beside the database first, which is left out while
        it is empty: then reading alone makes it and takes it away.

        Raises:
            InputError: as `database_url`.
            OSError: the log cannot be looked at.
        """
        if self._named_url() is not None:
            return None
        log = self.database_path.with_name(self.database_path.name + "-wal")
        try:
            is_used = log.stat().st_size > 0
        except FileNotFoundError:  # whoever wrote last takes it away
            is_used = False
        return (self.database_path, log) if is_used else (self.database_path,)

    def _named_url(self) -> str | None:
        """Of a database other than the file in the folder; None where there is none."""
        return os.environ.get(DATABASE_VARIABLE) or self._url_in_folder()

    def _url_in_folder(self) -> str | None:
        path = self.path / _DATABASE_FILE
        try:
            with path.open(encoding="utf-8") as file:
                lines = file.read(_LONGEST_URL + 1).strip().splitlines()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise InputError(f"{path} cannot be read: {reason}") from error
        if len(lines) != 1 or len(lines[0]) > _LONGEST_URL:  # not repeated: it may hold a password
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
        """Steps that were traced once; deleting it loses nothing but time."""
        return self.path / "step_profiles"

    @property
    def campaigns(self) -> Path:
        """Holds one folder for each campaign, named by its id."""
        return self.path / "campaigns"

    @classmethod
    def find(cls) -> Self:
        """The folder that TRAPPM_HOME names, else the user's data folder; maybe not there yet."""
        return cls(data_folder())

    @classmethod
    def open(cls) -> Self:
        """As `find`; made where missing.

        Raises:
            InputError: it is not a folder, or cannot be made or written to.
        """
        home = cls.find()
        try:
            for folder in (home.path, home.snapshots, home.campaigns):
                folder.mkdir(parents=True, exist_ok=True)
            # Only writing shows it: permission bits say nothing about root or read-only mounts.
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
