"""Devices by any name that people give them.

`a100`, `A100-SXM4-40GB`, `NVIDIA GeForce RTX 3090` and the paper's `GPU:A100-SXM4-40GB:1` all mean
a device that heads exist for, by its key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from trappm.profiler.devices.catalogue import read_name
from trappm.profiler.errors import InputError, SnapshotError

_COUNT = re.compile(r":(\d+)$")


def device_key(asked: object, keys: Iterable[str]) -> str:
    """Which of these keys a name means.

    Raises:
        SnapshotError: none, or more than one.
        InputError: several GPUs at once, or no name at all.
    """
    if not isinstance(asked, str):
        raise InputError(f"device is {asked!r}; give its name, such as 'a100'")
    keys = sorted(set(keys))
    if asked in keys:
        return asked
    count = _COUNT.search(asked)
    if count is not None and int(count[1]) != 1:
        raise InputError(f"device {asked!r} is {count[1]} GPUs; predictions are of one (':1')")
    card = read_name(asked[: count.start()] if count else asked)
    found = [key for key in keys if card.model and card.may_be(read_name(key))]
    if len(found) == 1:
        return found[0]
    if found:
        raise SnapshotError(f"device {asked!r} may be {' or '.join(found)}; name one of them")
    raise SnapshotError(f"there is no head for device {asked!r}; there are: {', '.join(keys)}")
