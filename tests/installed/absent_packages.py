"""An installation without extras, in a developer's environment: what only they bring is hidden.

What that is comes from pyproject.toml and the metadata of what is installed: nobody keeps
a list.
"""

import os
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

_BLOCKER = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        absent = name.partition(".")[0] in {absent!r}
        return None if absent else super().find_spec(name, path, target)

sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
"""


def of_extras_only(*kept):
    """Top-level modules that are installed, and that the runtime dependencies do not bring.

    Args:
        kept: further requirements that are there.
    """
    extras = {name for lines in PROJECT["optional-dependencies"].values() for name in _own(lines)}
    absent = extras - set(_own([*PROJECT["dependencies"], *kept]))
    return frozenset(
        module
        for module, distributions in metadata.packages_distributions().items()
        if {canonicalize_name(name) for name in distributions} <= absent
        and re.fullmatch(r"\w+", module)
    )


def _own(lines):
    """Distributions that these requirements bring, whatever they need in turn included."""
    waiting = [Requirement(line) for line in lines]
    seen = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) in seen or name == PROJECT["name"]:
                continue
            seen.add((name, extra))
            yield name
            try:
                needed = metadata.requires(name) or []
            except metadata.PackageNotFoundError:
                continue  # for another Python or platform, or of an extra that is not installed
            waiting += [
                dependency
                for dependency in map(Requirement, needed)
                if dependency.marker is None or dependency.marker.evaluate({"extra": extra})
            ]


def environment_without(absent, folder):
    """An environment in which Python and all its children cannot import these modules.

    Args:
        absent: top-level modules.
        folder: gets the file that hides them.
    """
    hidden = _BLOCKER.replace("{absent!r}", repr(set(absent)))
    (folder / "sitecustomize.py").write_text(hidden, encoding="utf-8")
    paths = [str(folder), *filter(None, sys.path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
