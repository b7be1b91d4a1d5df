"""Named protocols for campaign files and the command line."""

from __future__ import annotations

from trappm.profiler.errors import InputError
from trappm.profiler.records import Protocol

PAPER = Protocol(name="paper", warmup_steps=5, min_steps=50, max_steps=50)
"""5 warm-up and 50 timed steps, whatever the noise (TraPPM, section on data collection)."""

QUICK = Protocol(
    name="quick",
    warmup_steps=2,
    min_steps=8,
    max_steps=50,
    max_seconds=2.0,
    target_relative_error=0.01,
    timeout_s=120.0,
)
"""Stops when the median is known to about 1 %; for campaigns on CPUs, where steps are slow."""

ADAPTIVE = Protocol(
    name="adaptive",
    warmup_steps=5,
    min_steps=16,
    max_steps=500,
    max_seconds=4.0,
    target_relative_error=0.002,
)
"""Stops when the median is known to 0.2 % or does not improve; for GPUs."""

PROTOCOLS = {protocol.name: protocol for protocol in (PAPER, QUICK, ADAPTIVE)}


def protocol_named(name: str) -> Protocol:
    """Return the protocol of this name.

    Raises:
        InputError: There is none.
    """
    if name not in PROTOCOLS:
        raise InputError(f"no protocol is named {name!r}; there are {', '.join(PROTOCOLS)}")
    return PROTOCOLS[name]
