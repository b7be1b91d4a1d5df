"""Ceilings of devices, from measured kernels or else from the data sheet."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trappm.profiler.devices.base import rank_key
from trappm.profiler.devices.catalogue import card_name, card_of, read_name
from trappm.profiler.errors import InputError
from trappm.profiler.kernels.ceilings import Ceilings, ceilings

if TYPE_CHECKING:
    from trappm.profiler.kernels.kernel_call import KernelMeasurement
    from trappm.store import Store

COMPUTE, BANDWIDTH, LAUNCH = "compute", "bandwidth", "launch"
ON_PAPER = "data sheet"
UNITS = {COMPUTE: "TFLOP/s", BANDWIDTH: "GB/s", LAUNCH: "us"}
MEMORY = "memory"


@dataclass(frozen=True, kw_only=True)
class Roof:
    """One ceiling."""

    kind: str
    """`compute`, `bandwidth` or `launch`."""
    of: str
    """Data type such as `tf32`, memory level such as `L2`, or kind of launch."""
    value: float
    """Value in the unit of its kind (`UNITS`)."""
    source: str
    """Provenance of the kernels, such as `measured` or `imported`, or `data sheet`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownDevice:
    """A device with its ceilings and measured kernels."""

    key: str
    card: str
    """Full name in the catalogue if measurements report it, else the key."""
    roofs: tuple[Roof, ...]
    kernels: Sequence[KernelMeasurement] = ()
    """Last successful attempt of each call with the latest stack; empty if none was measured."""

    def of(self, kind: str) -> dict[str, Roof]:
        return {roof.of: roof for roof in self.roofs if roof.kind == kind}

    @property
    def measured(self) -> Ceilings:
        return ceilings(self.kernels)

    @property
    def name(self) -> str:
        """Return the name reported by the driver if the device was measured, else `card`."""
        name = self.kernels[-1].environment.get("device_name") if self.kernels else self.card
        return str(name or "unnamed")

    @property
    def memory(self) -> Roof | None:
        """Return the bandwidth of device memory, measured with the largest tensors."""
        levels = [*self.of(BANDWIDTH).values()]
        return levels[-1] if levels else None


def known_device(store: Store, name: str) -> KnownDevice:
    """Return a device by its key or by any name of a card.

    Ceilings that were not measured come from the data sheet of the card, if there is one.

    Raises:
        InputError: The device is unknown, or the name matches several devices in the store.
    """
    keys = store.kernels.devices()
    key = _key(name, keys)
    device = device_of(key, store.kernels.latest(key) if key in keys else [])
    if not device.roofs and not device.kernels:
        there = f" (known devices: {', '.join(sorted(keys))})" if keys else ""
        raise InputError(
            f"no kernels of {name!r} were measured{there} and the catalogue has no such card; "
            f"measure them with: trappm measure --kernels --device {name}"
        )
    return device


def device_of(key: str, kernels: Sequence[KernelMeasurement]) -> KnownDevice:
    """Return a device with ceilings from its measured kernels, else from its data sheet."""
    roofs = {(roof.kind, roof.of): roof for roof in _timed(kernels)}
    kinds = {kind for kind, _ in roofs}
    card = card_name(key, [kernels[-1].environment] if kernels else [])
    for roof in _on_paper(card):
        if roof.kind == COMPUTE or roof.kind not in kinds:
            roofs.setdefault((roof.kind, roof.of), roof)
    order = (COMPUTE, BANDWIDTH, LAUNCH)
    return KnownDevice(
        key=key,
        card=card,
        roofs=tuple(sorted(roofs.values(), key=lambda roof: order.index(roof.kind))),
        kernels=kernels,
    )


def _key(name: str, keys: Collection[str]) -> str:
    """Return the key that matches a name, or the name itself if no key matches."""
    card = read_name(name)
    alone = [key for key in sorted(keys) if rank_key(key).ranks == 1]
    alike = [key for key in alone if card.model and card.may_be(read_name(key))]
    if name in keys or not alike:
        return name
    if len(alike) > 1:
        raise InputError(f"device {name!r} is ambiguous; name one of: {', '.join(alike)}")
    return alike[0]


def _timed(kernels: Sequence[KernelMeasurement]) -> list[Roof]:
    known = ceilings(kernels)
    source = ", ".join(sorted({kernel.provenance.value for kernel in kernels}))
    rows = [(COMPUTE, kind, value) for kind, value in known.tflops.items()]
    rows += [(BANDWIDTH, b.level, b.gb_s) for b in known.bandwidths]
    launches = {"alone": known.launch_us, "one of many": known.dispatch_us}
    rows += [(LAUNCH, of, value) for of, value in launches.items() if value is not None]
    return [Roof(kind=k, of=of, value=value, source=source) for k, of, value in rows]


def _on_paper(named: str) -> list[Roof]:
    card = card_of(named)
    if card is None:
        return []
    rows = [
        (COMPUTE, "fp32", card.fp32_tflops),
        (COMPUTE, "tf32", card.tf32_tflops),
        (COMPUTE, "fp16", card.half_tflops),
        (COMPUTE, "bf16", card.half_tflops if card.has_bf16 else None),
        (BANDWIDTH, MEMORY, card.bandwidth_gbs),
    ]
    return [Roof(kind=k, of=of, value=v, source=ON_PAPER) for k, of, v in rows if v is not None]
