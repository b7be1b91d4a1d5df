"""What an error suggests to somebody who gave a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LISTED = 20
"""So many names are listed where none is near."""


def nearest(
    name: str, known: Iterable[str], *, otherwise: str | None = None, cutoff: float = 0.6
) -> str:
    """The end of an error message: the names most like this one, or those that there are.

    Args:
        name: that is not known.
        known: names.
        cutoff: least similarity of a name, by difflib.
        otherwise: what to say where no name is near, instead of listing them.
    """
    names = list(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=cutoff)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    if otherwise is not None:
        return otherwise
    if not names:
        return "there is none yet"
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"there are: {', '.join(names[:_LISTED])}{more}"
