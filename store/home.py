"""The data folder: where the label store, snapshots and campaigns' own files live."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from platformdirs import user_data_path
from sqlalchemy import URL

from profiler.errors import InputError

VARIABLE = "TRAPPM_HOME"


@dataclass(frozen=True)
class Home:
    """One data folder, by its absolute path; `open` finds and makes it."""

    path: Path

    @property
    def database_path(self) -> Path:
        return self.path / "labels.db"

    @property
    def database_url(self) -> str:
        """An SQLAlchemy URL, escaped so that any path can stand in it."""
        return URL.create("sqlite", database=str(self.database_path)).render_as_string()

    @property
    def snapshots(self) -> Path:
        return self.path / "snapshots"

    @property
    def campaigns(self) -> Path:
        """Holds one folder for each campaign, named by its id."""
        return self.path / "campaigns"

    @classmethod
    def find(cls) -> Self:
        """The folder that TRAPPM_HOME names, else the user's data folder; maybe not there yet."""
        named = os.environ.get(VARIABLE)
        path = Path(named).expanduser() if named else user_data_path("trappm", appauthor=False)
        return cls(path.absolute())

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
            # Only writing tells: permission bits say nothing about root or read-only mounts.
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
