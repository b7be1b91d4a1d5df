"""Heads of cards without labels, from common constants of other cards and the data sheet.

    step time   constants that all known cards share, or moved by what others published of the card:
                kernels alone, or steps too few for a head
    memory      simulated allocations, and the other memory of a process of today's software

Their intervals are quantiles of the errors on cards held out as a whole, or on architectures held
out where the card has steps (docs/research/step_time_constants.md). Memory was measured on two
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
import numpy.typing as npt
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from trappm.learner.estimator import with_prefix
from trappm.learner.heads.device_heads import Heads
from trappm.learner.heads.metric_head import Head
from trappm.learner.heads.predictions import StepSettings, TrainedHeads
from trappm.learner.physics.device_specs import CPU, known_spec
from trappm.learner.physics.kernel_times import starting_constants
from trappm.learner.physics.memory_prior import MemoryPrior
from trappm.learner.physics.prior import Prior
from trappm.learner.physics.step_time_prior import StepTimePrior
from trappm.learner.residual.residual import Residual
from trappm.learner.stats.calibration import Calibration
from trappm.profiler.devices.catalogue import read_name
from trappm.profiler.records import MemoryFormat, Optimizer, Phase, Precision

Array = npt.NDArray[np.float64]

FILE = Path(__file__).parents[1] / "physics/devices/other_devices.safetensors"
"""Written by `research/priors/other_devices.py --write`; the shipped snapshot has a copy."""
OTHERS = "other cards"
"""Key of manifest sources whose labels have no head."""
SETTINGS = (StepSettings(Precision.FP32, MemoryFormat.CONTIGUOUS, Optimizer.SGD),)
"""Default settings of a query without labels."""
GAUSSIAN = 1.645
"""Deviations to either side that hold 90 %."""


class Basis(enum.StrEnum):
    """Source of a head without labels."""

    STEPS = "steps"
    KERNELS = "kernels"
    SPECIFICATION = "specification"


@dataclass(frozen=True, eq=False)
class OtherDevices:
    """Common constants of all cards, and constants of cards with measured kernels."""

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

    def heads(self, device: str, phase: Phase) -> TrainedHeads | None:
        """Heads of step time and memory of a card; None where the catalogue does not list it."""
        spec, basis = known_spec(device), self.basis(device)
        if spec is None or basis is None:
            return None
        constants = self.of_cards.get((basis, read_name(device).model), self.constants)
        # Older snapshots do not know how far off cards with steps are, which is less than this.
        judged = basis if (basis, phase) in self.step_time else Basis.KERNELS
        step_time = head_of(StepTimePrior(spec, constants), self.step_time[judged, phase])
        memory = head_of(MemoryPrior.on(spec), self.memory)
        heads: dict[str, Head[Prior]] = {"memory_mib": memory, "step_time_ms": step_time}
        return TrainedHeads(Heads(heads, 0), SETTINGS)

    def completed(self, known: TrainedHeads, device: str, phase: Phase) -> TrainedHeads:
        """Heads of a device with those of the metrics that it had no labels of."""
        added = self.heads(device, phase)
        if added is None or not isinstance(known.heads, Heads):
            return known
        own, others = known.heads, added.heads
        assert isinstance(others, Heads)  # noqa: S101  (made above)
        return replace(known, heads=Heads({**others.heads, **own.heads}, own.label_count))

    def tensors(self) -> dict[str, Tensor]:
        tensors = {"constants": self.constants}
        tensors |= {f"{basis}.{model}": values for (basis, model), values in self.of_cards.items()}
        parts = {f"errors.{basis}.{phase}": c for (basis, phase), c in self.step_time.items()}
        for name, calibration in {**parts, "errors.memory": self.memory}.items():
            tensors |= {f"{name}.{key}": value for key, value in calibration.tensors().items()}
        return tensors

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
        judged = [
            (basis, phase)
            for basis, phase in product(Basis, Phase)
            if basis is not Basis.STEPS or with_prefix(tensors, f"errors.{basis}.{phase}.")
        ]
        return cls(
            _constants(tensors["constants"]),
            of_cards,
            {(basis, phase): calibration(f"errors.{basis}.{phase}") for basis, phase in judged},
            calibration("errors.memory"),
        )


def _constants(values: Tensor) -> Tensor:
    if values.shape != starting_constants().shape or not values.isfinite().all():
        raise ValueError(f"constants of shape {tuple(values.shape)}, or not finite")
    return values.double()


def write(others: OtherDevices, sources: Sequence[Mapping[str, object]], path: Path = FILE) -> None:
    """Keeps what is known of other cards, with where it comes from."""
    tensors = {name: tensor.contiguous() for name, tensor in others.tensors().items()}
    save_file(tensors, path, metadata={"sources": json.dumps(list(sources))})


def known_of_others(path: Path = FILE) -> tuple[OtherDevices, list[dict[str, object]]]:
    """Return the constants of other cards and the sources for the manifest."""
    with safe_open(path, "pt") as file:
        sources: list[dict[str, object]] = json.loads(file.metadata()["sources"])
    return OtherDevices.from_tensors(load_file(path)), sources


def head_of(prior: Prior, errors: Calibration) -> Head[Prior]:
    """A head without residual, of these errors of the logarithm."""
    low, high = errors.interval()
    deviation = (high - low) / (2 * GAUSSIAN)
    weights = {"process": 0.0, "trees": 0.0}
    residual = Residual(sum(prior.feature_groups), None, None, weights, deviation)
    return Head(prior, residual, Calibration(errors.quantiles / deviation), None)
