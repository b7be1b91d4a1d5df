"""Ceilings of devices, from the data sheets of their cards."""

from __future__ import annotations

from dataclasses import dataclass

from trappm.profiler.devices.catalogue import card_of
from trappm.profiler.errors import InputError

COMPUTE, BANDWIDTH, LAUNCH = "compute", "bandwidth", "launch"
UNITS = {COMPUTE: "TFLOP/s", BANDWIDTH: "GB/s"}
MEMORY = "memory"


@dataclass(frozen=True, kw_only=True)
class Roof:
    """One ceiling."""

    kind: str
    """`compute` or `bandwidth`."""
    of: str
    """Data type such as `tf32`, or `memory`."""
    value: float
    """Value in the unit of its kind (`UNITS`)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RooflineDevice:
    """A device with its ceilings."""

    key: str
    card: str
    """Full name in the catalogue if measurements report it, else the key."""
    roofs: tuple[Roof, ...]

    def of(self, kind: str) -> dict[str, Roof]:
        return {roof.of: roof for roof in self.roofs if roof.kind == kind}

    @property
    def memory(self) -> Roof:
        return self.of(BANDWIDTH)[MEMORY]


def roofline_device(key: str, named: str | None = None) -> RooflineDevice:
    """Return a device with the ceilings of its card's data sheet.

    Args:
        key: Key of the device.
        named: Full name of its card, if known.

    Raises:
        InputError: The catalogue has no such card.
    """
    card = card_of(named or key)
    if card is None:
        raise InputError(
            f"no data sheet has the peaks of {key!r}; name a GPU, such as a100, "
            "and list devices with: trappm devices"
        )
    rows = [
        (COMPUTE, "fp32", card.fp32_tflops),
        (COMPUTE, "tf32", card.tf32_tflops),
        (COMPUTE, "fp16", card.half_tflops),
        (COMPUTE, "bf16", card.half_tflops if card.has_bf16 else None),
        (BANDWIDTH, MEMORY, card.bandwidth_gbs),
    ]
    roofs = tuple(Roof(kind=k, of=of, value=v) for k, of, v in rows if v is not None)
    return RooflineDevice(key=key, card=named or key, roofs=roofs)
