"""A project of somebody else, whose packages have the names of our rooms."""

ROOMS = ("profiler", "store", "learner", "cluster")

THEIRS = f"""
import sys, pathlib
import trappm, trappm.store, trappm.cluster.spec
import {", ".join(ROOMS)}
from store import NAME
assert NAME == "the store of somebody else", NAME
assert trappm.cluster.spec.load_preset("laptop").name == "laptop"
theirs = {{pathlib.Path(m.__file__).parents[1] for m in ({", ".join(ROOMS)})}}
(folder,) = theirs
print(folder, pathlib.Path(trappm.__file__).parent)
"""
"""Prints where all of theirs are, and where ours is."""


def make_foreign(folder):
    """Such a project in this folder."""
    for room in ROOMS:
        (folder / room).mkdir()
        (folder / room / "__init__.py").write_text(f'NAME = "the {room} of somebody else"\n')
        (folder / room / "__main__.py").write_text(f'print("the {room} of somebody else")\n')
    return folder
