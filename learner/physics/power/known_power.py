"""Power constants of cards, fitted to labels of three cards.

`research/priors/power.py --write` writes `known_power.safetensors` from the labels in `MEASURED`.
Any other card has its data sheet and the constants that these cards share, with their spread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from trappm.learner.physics.power.operating_point import Sheet
from trappm.profiler.devices.catalogue import Card, card_of

Array = npt.NDArray[np.float64]

FILE = Path(__file__).parent / "known_power.safetensors"
MEASURED = {
    "v100": ("v100 pcie 32gb", "Zeus's training under limits, a V100 of 250 W (Apache-2.0)"),
    "p100": ("p100 pcie 16gb", "Zeus's training under limits, a P100 of 250 W (Apache-2.0)"),
    "h100": ("h100 sxm5", "our own labels of an H100 of 700 W, never at its limit"),
}
"""By model of card: the card whose data sheet its constants are relative to, and the labels."""
LEARNED_FROM = (
    ("nodes/zeus_train_power.csv", "Zeus, V100 and P100", "Apache-2.0", 359),
    ("h100/sweeps", "trappm, one day of a GPU", "", 160),
)
"""File, source, licence and number of labels of what all of it was learned from."""
UNKNOWN = "other"


@dataclass(frozen=True, eq=False)
class Normal:
    """Normal distribution of the logarithms of a card's constants."""

    mean: Array
    """(c)."""
    covariance: Array
    """(c, c)."""

    def draws(self, count: int, generator: np.random.Generator) -> Array:
        """Return random constants (count, c)."""
        return generator.multivariate_normal(self.mean, self.covariance, size=count)


@dataclass(frozen=True, eq=False)
class CardPower:
    """Constants of a card's power, with their reference."""

    sheet: Sheet
    constants: Normal
    noise: float
    """Deviation of the logarithm of power on workloads like none of the labels."""
    limit_w: float
    """Factory power limit in watts."""
    rests_on: str


def power_of(card: Card | None) -> CardPower | None:
    """Return the power constants of a card; None for MIG parts and cards without a known limit."""
    if card is None or card.power_w is None:
        return None
    known = _known()
    if card.name.model in MEASURED:
        reference, labels = MEASURED[card.name.model]
        measured = card_of(reference)
        if measured is None:
            raise KeyError(f"the catalogue has no {reference}, whose power was measured")
        constants, noise = known[card.name.model]
        return CardPower(Sheet.of(measured), constants, noise, card.power_w, labels)
    constants, noise = known[UNKNOWN]
    others = ", ".join(model.upper() for model in MEASURED)
    why = f"this card's limit of {card.power_w:g} W, and labels of {others}"
    return CardPower(Sheet.of(card), constants, noise, card.power_w, why)


def other_cards_shares() -> Array:
    """`CONSTANTS` of a card that nothing is known of (c)."""
    shares: Array = np.exp(_known()[UNKNOWN][0].mean)
    return shares


def write(known: Mapping[str, tuple[Normal, float]], path: Path = FILE) -> None:
    """Writes constants and noise by model of card; those of others are of `UNKNOWN`."""
    tensors = {}
    for name, (normal, noise) in known.items():
        tensors[f"{name}.mean"] = torch.from_numpy(normal.mean.copy())
        tensors[f"{name}.covariance"] = torch.from_numpy(normal.covariance.copy())
        tensors[f"{name}.noise"] = torch.tensor(noise, dtype=torch.float64)
    save_file(tensors, path)


@cache
def _known() -> dict[str, tuple[Normal, float]]:
    tensors = load_file(FILE)
    return {
        name: (
            Normal(tensors[f"{name}.mean"].numpy(), tensors[f"{name}.covariance"].numpy()),
            float(tensors[f"{name}.noise"]),
        )
        for name in (*MEASURED, UNKNOWN)
    }
