"""A question apart from its model and device; what is asked for is checked without torch."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trappm.learner.heads.predictions import StepSettings
from trappm.prediction import costs
from trappm.prediction.device_names import (
    DEFAULT_DEVICE,
    card_behind,
    gpus_of,
    key_among,
    precision_gap,
)
from trappm.prediction.snapshot_choice import manifests_that_answer, snapshots_that_answer
from trappm.profiler.devices.rank_keys import rank_key
from trappm.profiler.errors import InputError
from trappm.profiler.extensions import extension_modules
from trappm.profiler.models.known_names import is_prefixed
from trappm.profiler.records import MemoryFormat, Optimizer, Phase, Precision, member

if TYPE_CHECKING:
    from trappm.learner.heads.predictions import TrainedHeads
    from trappm.learner.snapshots.manifest_fields import Manifest
    from trappm.learner.snapshots.snapshot import Snapshot
    from trappm.prediction.prediction import Figures
    from trappm.profiler.simulation.training_loop import TrainingLoop

_FAMILIES: dict[str, type[enum.StrEnum]] = {
    "precision": Precision,
    "memory_format": MemoryFormat,
    "optimizer": Optimizer,
}

PLAIN = StepSettings(Precision.FP32, MemoryFormat.CONTIGUOUS, Optimizer.SGD)


class Question:
    """A question apart from its model and device: settings, snapshot, the length of a run."""

    def __init__(
        self,
        *,
        batch_size: int | None = None,
        phase: str = Phase.TRAIN,
        precision: str | None = None,
        memory_format: str | None = None,
        optimizer: str | None = None,
        loop: TrainingLoop | None = None,
        snapshot: str | Path | None = None,
        snapshots: Sequence[Snapshot] | None = None,
        epochs: int | None = None,
        samples: int | None = None,
        carbon_g_per_kwh: float | None = None,
        power_limit_w: float | None = None,
    ) -> None:
        """Check the settings.

        Args:
            batch_size: Samples per step.
            phase: `train` or `infer`.
            precision, memory_format, optimizer: Settings; None for those of most labels.
            loop: Training loop around the step; None for the usual one of the optimizer.
            snapshot: Id, alias or folder.
            snapshots: Loaded snapshots to try in this order, instead of `snapshot`.
            epochs, samples: Length of a run.
            carbon_g_per_kwh: Carbon intensity of the electricity.
            power_limit_w: Power limit of the GPU.

        Raises:
            InputError: a setting that there is not, or a run that cannot be.
        """
        self.batch_size = batch_size
        self.loop = loop
        self.phase = Phase(member("phase", Phase, phase))
        given = {"precision": precision, "memory_format": memory_format, "optimizer": optimizer}
        self._given: dict[str, Any] = {
            name: member(name, _FAMILIES[name], value)
            for name, value in given.items()
            if value is not None
        }
        self.optimizer: Optimizer | None = self._given.get("optimizer")
        if snapshot is not None and not isinstance(snapshot, str | Path):
            raise InputError(f"snapshot is {snapshot!r}; give an id, an alias or a folder")
        costs.check_limit(power_limit_w)
        costs.check_run(epochs=epochs, samples=samples, carbon_g_per_kwh=carbon_g_per_kwh)
        self.epochs = epochs
        self.power_limit_w = power_limit_w
        self._samples = samples
        self._carbon_g_per_kwh = carbon_g_per_kwh
        self._snapshot = snapshot
        self._snapshots = snapshots
        self.device_is_default = False
        """Whether the last `device_keys` got no device."""

    @property
    def names_snapshot(self) -> bool:
        """Whether the question names the snapshot that answers."""
        return self._snapshot is not None

    @cached_property
    def snapshots(self) -> Sequence[Snapshot]:
        return self._snapshots or snapshots_that_answer(self._snapshot)

    def device_keys(self, device: str | None, devices: Iterable[str] | str | None) -> list[str]:
        """The keys of the devices that the names mean; of `DEFAULT_DEVICE` if none is given.

        Raises:
            SnapshotError: there are no heads for one of them, or none at all for the phase.
            InputError: device and devices at once, or what is no device's name.
        """
        self.device_is_default = device is None and devices is None
        if devices == "all" and device is None:
            unable = self.unable_devices()
            able = [key for key in gpus_of(self._manifests, self.phase) if key not in unable]
            if not able:
                raise InputError(next(iter(unable.values())))
            return able
        if devices is None:
            names: list[Any] = [DEFAULT_DEVICE if device is None else device]
        elif device is not None:
            raise InputError("give device or devices, not both")
        else:
            names = [devices] if isinstance(devices, str) else list(devices)
        if not names:
            raise InputError("the list of devices is empty; name some, or ask for all")
        return [key_among(self._manifests, name) for name in names]

    def unable_devices(self) -> dict[str, str]:
        """Return the GPUs with trained models that cannot run the precision, each with the reason.

        Raises:
            SnapshotError: There are no trained models for the phase.
        """
        precision = self._given.get("precision")
        if precision is None:
            return {}
        manifests = self._manifests
        gaps = {
            key: precision_gap(card_behind(manifests, key), precision)
            for key in gpus_of(manifests, self.phase)
        }
        return {key: gap for key, gap in gaps.items() if gap is not None}

    @property
    def _manifests(self) -> Sequence[Manifest]:
        """Of the snapshots that answer, which tell what there is before torch is needed."""
        if self._snapshots:
            return [snapshot.manifest for snapshot in self._snapshots]
        return manifests_that_answer(self._snapshot)

    def snapshot_for(self, device: str) -> Snapshot:
        """The first with heads of the device and phase; else the last, which may know its card."""
        known = (s for s in self.snapshots if self.phase in s.heads.get(device, {}))
        return next(known, self.snapshots[-1])

    def trained(self, device: str, model: str) -> tuple[TrainedHeads, str | None]:
        """The heads that answer for a model, and what step times rest on if not on their labels.

        Of transformers it is published steps of language models, where there are such for the card
        and no label of a campaign of one's own has the precision.

        Raises:
            SnapshotError: there are no heads for the device and the phase.
        """
        snapshot = self.snapshot_for(device)
        trained = snapshot.trained(device, self.phase)
        of_ranks = rank_key(device).ranks > 1  # whose step is longer by what they say to each other
        if not is_prefixed(model) or snapshot.others is None or of_ranks:
            return trained, None
        precision = self.settings(trained).precision
        labelled = {settings.precision for settings in trained.settings}
        if snapshot.manifest.campaign is not None and precision in labelled:
            return trained, None
        card = snapshot.card(device)
        for extension in extension_modules("model_heads"):
            made: tuple[TrainedHeads, str] | None
            made = extension.model_heads(model, trained, snapshot.others, card, precision)
            if made is not None:
                return made
        return trained, None

    def settings_traced(self, devices: Iterable[str]) -> list[StepSettings]:
        """Those that a model's steps are traced in, beside fp32 and contiguous.

        Raises:
            SnapshotError: there are no heads for a device and the phase.
        """
        trained = [self.snapshot_for(key).trained(key, self.phase) for key in devices]
        settings = dict.fromkeys(map(self.settings, trained))
        return [row for row in settings if row[:2] != PLAIN[:2]]  # the profile has the plain ones

    def settings(self, trained: TrainedHeads) -> StepSettings:
        """The question's settings of a step, the rest as in most labels that agree with it.

        AdamW keeps the states of Adam and moves its bytes: labels of one answer for the other.
        """
        given = self._given
        if "optimizer" in given and given["optimizer"].is_adam:
            labelled = [row.optimizer for row in trained.settings if row.optimizer.is_adam]
            if given["optimizer"] not in labelled:
                given = {**given, "optimizer": (*labelled, Optimizer.ADAM)[0]}
        agreeing = [
            row
            for row in trained.settings
            if all(getattr(row, name) == value for name, value in given.items())
        ]
        usual = (*agreeing, *trained.settings, PLAIN)[0]
        return usual._replace(**given)

    def given_settings(self) -> StepSettings:
        """Return the settings that the question names, the rest plain: fp32, contiguous, SGD."""
        return PLAIN._replace(**self._given)

    def run(self, device: str, batch: int, ranks: int, figures: Figures) -> costs.Run | None:
        """What all epochs cost; batch and energy are a rank's."""
        step_time_ms = figures.step_time_ms
        if self.epochs is None or self._samples is None or step_time_ms is None:
            return None
        return costs.run_of(
            epochs=self.epochs,
            samples=self._samples,
            batch_size=ranks * batch,
            step_time_ms=(step_time_ms, *figures.intervals["step_time_ms"]),
            energy_j=None if figures.energy_j is None else ranks * figures.energy_j,
            carbon_g_per_kwh=self._carbon_g_per_kwh,
            prices=costs.prices_of(device),
        )
