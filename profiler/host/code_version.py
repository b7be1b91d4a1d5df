"""Which code runs: the git commit, where it runs from a checkout of ours.

An installation may lie inside of somebody else's repository, so git is asked for this very file.
"""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Commit(NamedTuple):
    """A commit, or why a checkout's is not known; neither for what runs from no checkout."""

    name: str | None
    """12 hexadecimal digits, with `-dirty` where files were changed."""
    missing: str | None = None


@cache
def code_commit() -> Commit:
    """The commit that this code stands at; asked of git once in a process."""
    here = Path(__file__).resolve()  # the rooms stand as links in `trappm/`
    if not any((folder / ".git").exists() for folder in here.parents):
        return Commit(None)
    try:
        if not _git(here.parent, "ls-files", "--", here.name):
            return Commit(None)
        words = ("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
        return Commit(_git(here.parent, *words))
    except subprocess.CalledProcessError as error:
        return Commit(None, f"the checkout's commit is not told: {error.stderr.strip() or error}")
    except (OSError, subprocess.SubprocessError) as error:
        return Commit(None, f"the checkout's commit is not told: {error}")


def _git(folder: Path, *words: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()
