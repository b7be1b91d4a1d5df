"""Constants of a card's power, in units of a data sheet."""

from __future__ import annotations

from dataclasses import dataclass

from trappm.extensions.power_limits.operating_point import Sheet
from trappm.learner.physics.power import MEASURED, UNKNOWN, Normal, known_power
from trappm.profiler.devices.catalogue import Card, card_of


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
    known = known_power()
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
