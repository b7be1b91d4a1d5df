"""Heads of cards without labels, from common constants of other cards and the data sheet.

    step time   constants by what others published of the card: steps too few for a head, or kernels
                alone; else those of the most similar card with steps
    memory      simulated allocations, and the other memory of a process of today's software

Their intervals are quantiles of the errors on cards held out as a whole, or on architectures held
out where the card has steps (docs/research/step_time.md). Memory was measured on two
cards only, so its interval is indicative: how far a third card is from both is unknown.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Self

import numpy as np
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from trappm.learner.heads.physics_heads import Head, Heads, Residual
from trappm.learner.interface import Z90, TrainedHeads, joined_tensors, with_prefix
from trappm.learner.physics.memory import MemoryPrior
from trappm.learner.physics.prior import Prior
from trappm.learner.physics.step_time import StepTimePrior, starting_constants
from trappm.learner.stats.calibration import Calibration
from trappm.profiler.devices.catalogue import CPU, known_spec, most_similar, read_name
from trappm.profiler.records import MemoryFormat, Optimizer, Phase, Precision, StepSettings

FILE = Path(__file__).parents[1] / "physics/devices/other_devices.safetensors"
"""Written by `research/priors/other_devices.py --write`; the shipped snapshot has a copy."""
OTHERS = "other cards"
"""Key of manifest sources whose labels have no head."""
STEPS_BASIS = "few published steps of this card and other cards' labels"
SETTINGS = (StepSettings(Precision.FP32, MemoryFormat.CONTIGUOUS, Optimizer.SGD),)
"""Default settings of a query without labels."""


class Basis(enum.StrEnum):
    """Source of a head without labels."""

    STEPS = "steps"
    KERNELS = "kernels"
    SPECIFICATION = "specification"


@dataclass(frozen=True, eq=False)
class OtherDevices:
    """Constants of cards with published steps or kernels, and common ones of all cards."""

    constants: Tensor
    """Constants of step times common to all known cards (c)."""
    of_cards: Mapping[tuple[Basis, str], Tensor]
    """Constants after a fit to steps or kernels of one card (c), by card model."""
    step_time: Mapping[tuple[Basis, Phase], Calibration]
    """Quantiles of log(measured / predicted) by source."""
    memory: Calibration
    """The same of memory in training, of two cards."""

    def basis(self, device: str) -> Basis | None:
        """Return the basis of step times of this device; None outside the catalogue."""
        if known_spec(device) in (None, CPU):
            return None
        model = read_name(device).model
        published = (basis for basis in Basis if (basis, model) in self.of_cards)
        return next(published, Basis.SPECIFICATION)

    def constants_of(self, device: str) -> Tensor:
        """Return the constants of a card, or of the one with steps that is most like it (c)."""
        model, basis = read_name(device).model, self.basis(device)
        if basis is not None and (basis, model) in self.of_cards:
            return self.of_cards[basis, model]
        like = most_similar(device, [m for kind, m in self.of_cards if kind is Basis.STEPS])
        return self.constants if like is None else self.of_cards[Basis.STEPS, like]

    def heads(self, device: str, phase: Phase) -> TrainedHeads | None:
        """Heads of step time and memory of a card; None where the catalogue does not list it."""
        heads = self._heads(device, phase)
        return None if heads is None else TrainedHeads(heads, SETTINGS)

    def _heads(self, device: str, phase: Phase) -> Heads | None:
        spec, basis = known_spec(device), self.basis(device)
        if spec is None or basis is None:
            return None
        prior = StepTimePrior(spec, self.constants_of(device))
        step_time = head_of(prior, self.step_time[basis, phase])
        memory = head_of(MemoryPrior.on(spec), self.memory)
        return Heads({"memory_mib": memory, "step_time_ms": step_time}, 0)

    def completed(self, known: TrainedHeads, device: str, phase: Phase) -> TrainedHeads:
        """Heads of a device with those of the metrics that it had no labels of."""
        own, added = known.heads, self._heads(device, phase)
        if added is None or not isinstance(own, Heads):
            return known
        return replace(known, heads=replace(own, heads={**added.heads, **own.heads}))

    def by_steps(
        self, known: TrainedHeads, device: str, phase: Phase
    ) -> tuple[TrainedHeads, str | None]:
        """Return heads whose step times come from published steps of the card, and their basis.

        The heads are unchanged, without a basis, if there are no published steps of the card, or
        their step times do not come from labels.
        """
        own, added = known.heads, self._heads(device, phase)
        if added is None or self.basis(device) is not Basis.STEPS or not isinstance(own, Heads):
            return known, None
        head = own.heads.get("step_time_ms")
        if head is None or head.familiarity is None:
            return known, None
        heads = {**own.heads, "step_time_ms": added.heads["step_time_ms"]}
        return replace(known, heads=replace(own, heads=heads)), STEPS_BASIS

    def tensors(self) -> dict[str, Tensor]:
        tensors = {"constants": self.constants}
        tensors |= {f"{basis}.{model}": values for (basis, model), values in self.of_cards.items()}
        parts = {f"errors.{basis}.{phase}": c for (basis, phase), c in self.step_time.items()}
        return tensors | joined_tensors({**parts, "errors.memory": self.memory})

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Raises KeyError or ValueError for tensors that are not those of other devices."""

        def calibration(name: str) -> Calibration:
            read = Calibration.from_tensors(with_prefix(tensors, f"{name}."))
            low, high = read.interval()
            if not low < high < np.inf:
                raise ValueError(f"errors between {low} and {high}")
            return read

        of_cards = {
            (basis, model): _constants(values)
            for basis in (Basis.STEPS, Basis.KERNELS)
            for model, values in with_prefix(tensors, f"{basis}.").items()
        }
        step_time = {
            (basis, phase): calibration(f"errors.{basis}.{phase}")
            for basis, phase in product(Basis, Phase)
        }
        constants = _constants(tensors["constants"])
        return cls(constants, of_cards, step_time, calibration("errors.memory"))


def _constants(values: Tensor) -> Tensor:
    if values.shape != starting_constants().shape or not values.isfinite().all():
        raise ValueError(f"constants of shape {tuple(values.shape)}, or not finite")
    return values.double()


def write(others: OtherDevices, sources: Sequence[Mapping[str, object]], path: Path = FILE) -> None:
    """Write the constants of other cards with their sources."""
    tensors = {name: tensor.contiguous() for name, tensor in others.tensors().items()}
    save_file(tensors, path, metadata={"sources": json.dumps(list(sources))})


def known_of_others() -> tuple[OtherDevices, list[dict[str, object]]]:
    """Return the constants of other cards and the sources for the manifest."""
    with safe_open(FILE, "pt") as file:
        sources: list[dict[str, object]] = json.loads(file.metadata()["sources"])
    return OtherDevices.from_tensors(load_file(FILE)), sources


def similar_constants(card: str) -> Tensor | None:
    """Return the step-time constants of the most similar card (c); None unless it is a GPU."""
    others = known_of_others()[0]
    return None if others.basis(card) is None else others.constants_of(card)


def head_of(prior: Prior, errors: Calibration) -> Head[Prior]:
    """A head without residual, of these errors of the logarithm."""
    low, high = errors.interval()
    deviation = (high - low) / (2 * Z90)
    residual = Residual(sum(prior.feature_groups), None, 0.0, deviation)
    return Head(prior, residual, Calibration(errors.quantiles / deviation), None)
