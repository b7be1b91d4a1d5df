"""Cost of a whole training: time, money, energy and CO2.

Prices are in `prices.yaml`, by cloud and GPU, each with the date it was noted. A file of that name
in TRAPPM_HOME replaces it, and a question can give its own price.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trappm.profiler.devices.catalogue import card_of, rank_key
from trappm.profiler.errors import InputError, one_line
from trappm.profiler.files import load_yaml
from trappm.profiler.host.environment import data_folder

if TYPE_CHECKING:
    pass

FILE = "prices.yaml"
MAX_BYTES = 1 << 20
MAX_USD_PER_HOUR = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Price:
    """One offer of one GPU."""

    cloud: str
    device: str
    """Any name of the card; of devices that are no listed card, the beginning of the key."""
    usd_per_hour: float
    """Price of one GPU; that of an instance with several is divided."""
    noted: date | None
    source: str


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Cost of a training at one cloud."""

    cloud: str
    usd: float
    low_usd: float
    high_usd: float
    usd_per_hour: float
    noted: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """A whole training; bounds of its hours follow from those of the step time."""

    epochs: int
    samples: int
    steps: int
    hours: float
    low_hours: float
    high_hours: float
    offers: tuple[Offer, ...]
    """The cheapest first; empty if no price of the device is known."""
    energy_kwh: float | None
    co2_kg: float | None

    @property
    def length(self) -> str:
        """Return the length in words, such as `90 epochs`."""
        return f"{self.epochs:,} epoch{'' if self.epochs == 1 else 's'}"


def run_of(
    *,
    epochs: int,
    samples: int,
    batch_size: int,
    step_time_ms: tuple[float, float, float],
    energy_j: float | None,
    carbon_g_per_kwh: float | None,
    prices: tuple[Price, ...],
) -> Run:
    """Return the whole run from the prediction of a step.

    Args:
        epochs, samples: Number of epochs, and of samples per epoch.
        batch_size: Samples per step, of all ranks.
        step_time_ms: Median and bounds.
        energy_j: Energy of a step, of all ranks.
        carbon_g_per_kwh: Carbon intensity of the electricity.
        prices: Offers of the device.
    """
    steps = epochs * -(-samples // batch_size)
    hours, low, high = (steps * ms / 3.6e6 for ms in step_time_ms)
    energy = None if energy_j is None else steps * energy_j / 3.6e6
    co2 = None if energy is None or carbon_g_per_kwh is None else energy * carbon_g_per_kwh / 1000
    return Run(
        epochs=epochs,
        samples=samples,
        steps=steps,
        hours=hours,
        low_hours=low,
        high_hours=high,
        offers=tuple(
            Offer(
                cloud=price.cloud,
                usd=hours * price.usd_per_hour,
                low_usd=low * price.usd_per_hour,
                high_usd=high * price.usd_per_hour,
                usd_per_hour=price.usd_per_hour,
                noted=str(price.noted or ""),
            )
            for price in sorted(prices, key=lambda p: p.usd_per_hour)
        ),
        energy_kwh=energy,
        co2_kg=co2,
    )


def prices_of(
    device: str, usd_per_hour: float | None = None, card: str | None = None
) -> tuple[Price, ...]:
    """Return all offers of a device, or none for several ranks, since prices are of one GPU.

    Args:
        device: Key of the device.
        usd_per_hour: Price of the device that replaces the known ones.
        card: Card behind the key (default: the card that the key names).

    Raises:
        InputError: The file of prices in TRAPPM_HOME cannot be read.
    """
    if usd_per_hour is not None:
        given = Price(
            cloud="given", device=device, usd_per_hour=usd_per_hour, noted=None, source="question"
        )
        return (given,)
    if rank_key(device).ranks > 1:
        return ()
    known = _card_of(card or device)
    return tuple(
        price
        for price in _read(*prices_version())
        if _card_of(price.device) == known
        and (known is not None or device.startswith(price.device))
    )


_card_of = lru_cache(maxsize=256)(card_of)
"""Each price of the file is compared with each device."""


def prices_version() -> tuple[Path, int, int]:
    """Return the price file in use, its modification time in ns and its size in bytes."""
    own = data_folder() / FILE
    path = own if own.is_file() else Path(__file__).parent / FILE
    status = path.stat()
    return path, status.st_mtime_ns, status.st_size


@lru_cache(maxsize=8)
def _read(path: Path, _modified_ns: int, _size: int) -> tuple[Price, ...]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES} bytes")
        return tuple(map(_price, load_yaml(data, str(path))["prices"]))
    except (OSError, InputError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path} is no list of prices ({one_line(error)}); see docs/snapshots.md, or remove it"
        ) from error


def _price(row: dict[str, Any]) -> Price:
    price = Price(**{name: row[name] for name in Price.__annotations__})
    usd = price.usd_per_hour
    if not isinstance(usd, int | float) or not 0 < usd < MAX_USD_PER_HOUR:
        raise ValueError(f"usd_per_hour is {usd!r}")
    if not isinstance(price.noted, date) or not isinstance(price.device, str):
        raise ValueError(f"an entry has no date or device: {row}")
    return price
