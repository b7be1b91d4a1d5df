"""The folder of all data; found without a database, so that predictions start quickly."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_data_path

VARIABLE = "TRAPPM_HOME"


def data_folder() -> Path:
    """Return TRAPPM_HOME, or else the user's data folder; it may not exist yet."""
    named = os.environ.get(VARIABLE)
    path = Path(named).expanduser() if named else user_data_path("trappm", appauthor=False)
    return path.absolute()
