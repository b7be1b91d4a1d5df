"""Kinds of devices with several ranks: `a100x4`, `cpu-2x1t` and `a100x4-fsdp`.

Each rank is a process with its own device: a GPU of the node, or some cores of the host.
"""

KINDS = {"ranks": "trappm.extensions.parallel.ranks_device:RanksDevice"}
"""Class of each kind of device."""
