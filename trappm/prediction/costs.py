"""The power of a step, and what a whole training costs: time, money, energy and CO2.

Prices stand in `prices.yaml`, by cloud and GPU, each with the day it was noted on; a file of that
name in TRAPPM_HOME takes its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trappm.profiler.devices.base import rank_key
from trappm.profiler.devices.catalogue import card_of
from trappm.profiler.errors import InputError, one_line
from trappm.profiler.files.yaml_text import load_yaml
from trappm.profiler.host.environment import data_folder

if TYPE_CHECKING:
    from trappm.learner.heads.predictions import DeviceHeads
    from trappm.learner.physics.power.step_power import Interval
    from trappm.learner.physics.power.thrift import Thrift
    from trappm.learner.workload import Workload

FILE = "prices.yaml"
MAX_BYTES = 1 << 20
MAX_COUNT = 10**12
"""Epochs, and samples of one."""
MAX_CARBON_G_PER_KWH = 10_000
MOST_LIMIT_W = 10_000
_COLUMNS = {"cloud": str, "device": str, "usd_per_hour": (int, float), "noted": date, "source": str}


@dataclass(frozen=True, kw_only=True)
class Price:
    """One offer of one GPU."""

    cloud: str
    device: str
    """The beginning of a device's key."""
    usd_per_hour: float
    """Of one GPU; instances with more are divided."""
    noted: date
    source: str


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What a training costs somewhere."""

    cloud: str
    usd: float
    low_usd: float
    high_usd: float
    usd_per_hour: float
    noted: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """So many epochs of so many samples."""

    epochs: int
    samples: int
    steps: int
    hours: float
    low_hours: float
    """Bounds as of the step time's interval."""
    high_hours: float
    offers: tuple[Offer, ...]
    """The cheapest first; none where no price of the device is known."""
    energy_kwh: float | None
    co2_kg: float | None

    @property
    def length(self) -> str:
        """In words, such as `90 epochs`."""
        return f"{self.epochs:,} epoch{'' if self.epochs == 1 else 's'}"


@dataclass(frozen=True, kw_only=True)
class Power:
    """What is known of a step's power beside its heads."""

    figures: Mapping[str, Interval] = field(default_factory=dict)
    """Median, low and high of power, and of what else hangs on it, by the names of `Prediction`."""
    power_limit_w: float | None = None
    """Of the question."""
    power_source: str | None = None
    """Whose labels it rests on."""
    thriftiest: Thrift | None = None


def check_limit(power_limit_w: object) -> None:
    """Raises InputError for what is no power limit of any card; None is none."""
    limit = power_limit_w
    if limit is not None and not (
        isinstance(limit, int | float) and type(limit) is not bool and 0 < limit <= MOST_LIMIT_W
    ):
        raise InputError(
            f"the power limit is {power_limit_w!r}; it must be a number of watts above 0, at most "
            f"{MOST_LIMIT_W:,}"
        )


def power_of_step(
    workload: Workload,
    heads: DeviceHeads,
    card: str,
    step_time_ms: Interval | None,
    limit_w: float | None,
) -> Power:
    """Power and energy of a step on a card, by its kernels.

    Args:
        workload: with its kernels, where they could be traced.
        heads: of the device.
        card: any of its names.
        step_time_ms: under the limit as delivered; None where no head predicts it.
        limit_w: None for the limit as delivered.

    Raises:
        InputError: no limit of this card, or nothing is known of its power.
    """
    from trappm.learner.heads.device_heads import Heads
    from trappm.learner.physics.power.known_power import power_of
    from trappm.learner.physics.power.step_power import StepPower
    from trappm.learner.physics.step_time_prior import StepTimePrior

    known = power_of(card_of(card))
    if known is None or workload.kernels is None:
        if limit_w is not None:
            why = f"of the power of {card}" if known is None else "of the kernels of this model"
            raise InputError(f"nothing is known {why}, so not what a power limit does to it")
        return Power()
    head = heads.heads.get("step_time_ms") if isinstance(heads, Heads) else None
    times = head.prior if head is not None and isinstance(head.prior, StepTimePrior) else None
    step = StepPower(workload, times, card, known, step_time_ms)
    figures = step.under(known.limit_w if limit_w is None else limit_w)
    time_ms, low, high = figures["step_time_ms"]
    if step_time_ms is None:
        del figures["step_time_ms"], figures["energy_j"]
    elif limit_w is None:
        del figures["step_time_ms"]  # that is the head's affair
    else:
        samples_ms = 1e3 * workload.batch_size
        figures["samples_per_s"] = samples_ms / time_ms, samples_ms / high, samples_ms / low
    return Power(
        figures=figures,
        power_limit_w=limit_w,
        power_source=known.rests_on,
        thriftiest=None if step_time_ms is None else step.thriftiest(),
    )


def check_run(*, epochs: object, samples: object, carbon_g_per_kwh: object) -> None:
    """Checks the length of a run and the carbon intensity; None is what was not given.

    Raises:
        InputError: half of a run, or epochs, samples or carbon intensity that cannot be.
    """
    if (epochs is None) != (samples is None):
        raise InputError("a whole run needs both epochs and samples (of one epoch)")
    for name, value in (("epochs", epochs), ("samples", samples)):
        if value is not None and not (type(value) is int and 1 <= value <= MAX_COUNT):
            raise InputError(
                f"{name} is {value!r}; it must be a whole number from 1 to {MAX_COUNT:,}"
            )
    carbon = carbon_g_per_kwh
    if carbon is not None and not (
        isinstance(carbon, int | float) and 0 <= carbon <= MAX_CARBON_G_PER_KWH
    ):
        raise InputError(
            f"carbon intensity is {carbon!r} g/kWh; it must be 0 to {MAX_CARBON_G_PER_KWH:,}"
        )


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
    """The whole run; `step_time_ms` is the prediction and its bounds, `energy_j` is of a step."""
    steps = epochs * -(-samples // batch_size)
    hours, low, high = (steps * ms / 3.6e6 for ms in step_time_ms)
    offers = [
        Offer(
            cloud=price.cloud,
            usd=hours * price.usd_per_hour,
            low_usd=low * price.usd_per_hour,
            high_usd=high * price.usd_per_hour,
            usd_per_hour=price.usd_per_hour,
            noted=price.noted.isoformat(),
        )
        for price in sorted(prices, key=lambda p: p.usd_per_hour)
    ]
    energy = None if energy_j is None else steps * energy_j / 3.6e6
    carbon = None
    if energy is not None and carbon_g_per_kwh is not None:
        carbon = energy * carbon_g_per_kwh / 1000
    return Run(
        epochs=epochs,
        samples=samples,
        steps=steps,
        hours=hours,
        low_hours=low,
        high_hours=high,
        offers=tuple(offers),
        energy_kwh=energy,
        co2_kg=carbon,
    )


def prices_of(device: str) -> tuple[Price, ...]:
    """All offers of a device; of ranks none, as prices are of a single one.

    Raises:
        InputError: the file of prices in TRAPPM_HOME cannot be read.
    """
    if rank_key(device).ranks > 1:
        return ()
    prices = _read(*prices_version())
    return tuple(price for price in prices if device.startswith(price.device))


def prices_version() -> tuple[Path, int, int]:
    """The file that is in force, when it was changed (ns) and its size: other prices, another."""
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
        rows = load_yaml(data, str(path))["prices"]
        return tuple(_price(row) for row in rows)
    except (OSError, InputError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path} is no list of prices ({one_line(error)}); see docs/snapshots.md, or remove it"
        ) from error


def _price(row: dict[str, Any]) -> Price:
    for name, kind in _COLUMNS.items():
        if name not in row:
            raise ValueError(f"an entry without {name}: {row}")
        if not isinstance(row[name], kind):  # type: ignore[arg-type]
            raise ValueError(f"{name} is {row[name]!r}")
    if not 0 < row["usd_per_hour"] < 1e6:
        raise ValueError(f"usd_per_hour is {row['usd_per_hour']}")
    return Price(**{name: row[name] for name in _COLUMNS})
