"""Names of devices, to tell a misspelt one from one that is not on this machine."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from trappm.profiler.devices.catalogue import card_keys, card_of

_FURTHER_GPUS = (
    "a100x", "a10m", "a30x", "k40", "k80", "l2", "l40g", "m10", "m40",
    "m60", "p4", "p40", "p6", "t4g",
)  # fmt: skip
"""NVIDIA's for servers, beside those of the catalogue; each differs from another one by a letter,
so without this list they would be taken for misspelt."""

_TOO_MANY = ("rtx", "gtx")
"""Beginnings of the names of cards, which no list has in full."""

_CLOSE = 0.75
"""Of difflib's likeness: a round number, above its usual 0.6, as names of cards are alike."""
_SIMULATED = "simulated:"


def nearest_device(key: str, offered: Iterable[str]) -> str | None:
    """The device that a misspelt key probably means; None for a key that may well be right.

    Args:
        key: a GPU's name, or a simulated one.
        offered: keys that are known to be right, beside the names of GPUs.
    """
    if key.startswith(_SIMULATED):
        near = None if card_of(key) else _nearest(key.removeprefix(_SIMULATED), card_keys())
        return f"{_SIMULATED}{near}" if near else None
    if key.startswith(_TOO_MANY) or (key == key.lower() and card_of(key)):
        return None
    return _nearest(key, {*card_keys(), *_FURTHER_GPUS, *offered})


def _nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like this one; None if it is known, or like none."""
    ordered = sorted(known)
    if name in ordered:
        return None
    near = difflib.get_close_matches(name.lower(), ordered, n=1, cutoff=_CLOSE)
    return near[0] if near else None
