"""A question apart from its model and device; its settings are checked without torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trappm.prediction import cost
from trappm.prediction.device_names import (
    DEFAULT_DEVICE,
    card_behind,
    gpus_of,
    key_among,
    precision_gap,
)
from trappm.prediction.models import check_size
from trappm.prediction.snapshot_choice import manifests_that_answer, snapshots_that_answer
from trappm.prediction.training_loops import loop_for, loop_of
from trappm.profiler.devices.catalogue import rank_key
from trappm.profiler.errors import InputError
from trappm.profiler.extensions import extension_modules
from trappm.profiler.models.known_names import is_prefixed
from trappm.profiler.records import (
    Execution,
    MemoryFormat,
    Optimizer,
    Phase,
    Precision,
    StepSettings,
    member,
)

if TYPE_CHECKING:
    import torch

    from trappm.learner.interface import TrainedHeads
    from trappm.learner.snapshots.manifest import Manifest
    from trappm.learner.snapshots.snapshot import Snapshot
    from trappm.prediction.models import Subject
    from trappm.profiler.memory.simulation import TrainingLoop


class Question:
    """A question apart from its model and device: settings, snapshot, the length of a run."""

    def __init__(
        self,
        *,
        batch_size: int | None = None,
        phase: str = Phase.TRAIN,
        precision: str | None = None,
        memory_format: str | None = None,
        optimizer: str | type | torch.optim.Optimizer | TrainingLoop | None = None,
        execution: str = Execution.EAGER,
        snapshot: str | Path | None = None,
        snapshots: Sequence[Snapshot] | None = None,
        epochs: int | None = None,
        samples: int | None = None,
        carbon_g_per_kwh: float | None = None,
        power_limit_w: float | None = None,
        usd_per_hour: float | None = None,
        accumulation: int | None = None,
    ) -> None:
        """Check the settings, which are those of `trappm.predict`; raises InputError.

        Args:
            snapshots: Loaded snapshots to try in this order, instead of `snapshot`.
        """
        check_size("batch size", batch_size)
        self.batch_size = batch_size
        self.phase = Phase(member("phase", Phase, phase))
        self._given: dict[str, Any] = {}
        if precision is not None:
            self._given["precision"] = member("precision", Precision, precision)
        if memory_format is not None:
            self._given["memory_format"] = member("memory_format", MemoryFormat, memory_format)
        self.execution = member("execution", Execution, execution)
        loop = None
        if optimizer is not None:
            loop = loop_of(optimizer)
            self._given["optimizer"] = loop.optimizer
        self.optimizer: Optimizer | None = self._given.get("optimizer")
        self.accumulation = 1 if loop is None else loop.accumulation_steps
        """Forward and backward passes per optimizer step."""
        if accumulation is not None:
            check_size("accumulation", accumulation)
            self.accumulation = accumulation
            loop = loop and replace(loop, accumulation_steps=accumulation)
        if self.phase is Phase.INFER:
            if accumulation is not None and accumulation > 1:
                raise InputError(
                    f"accumulation is {accumulation}, which is of training; leave it out with "
                    "phase infer"
                )
            self.accumulation = 1
        self._loop = None if isinstance(optimizer, str) and self.accumulation == 1 else loop
        self._optimizer: Any = optimizer if hasattr(optimizer, "param_groups") else None
        if snapshot is not None and not isinstance(snapshot, str | Path):
            raise InputError(f"snapshot is {snapshot!r}; give an id, an alias or a folder")
        self.identity = (
            batch_size, phase, precision, memory_format, self.optimizer, self._loop, str(snapshot),
            epochs, samples, carbon_g_per_kwh, power_limit_w, usd_per_hour, str(self.execution),
            self.accumulation, self._optimizer is not None,
        )  # fmt: skip
        """Equal for equal questions; by `repr`, too."""
        cost.check_amount("power limit", "watts", power_limit_w, cost.MOST_LIMIT_W)
        cost.check_amount("price", "USD per hour", usd_per_hour, cost.MOST_USD_PER_HOUR)
        cost.check_run(epochs=epochs, samples=samples, carbon_g_per_kwh=carbon_g_per_kwh)
        self.epochs = epochs
        self.power_limit_w = power_limit_w
        self.usd_per_hour = usd_per_hour
        self.samples = samples
        self.carbon_g_per_kwh = carbon_g_per_kwh
        self.snapshot = snapshot
        self._snapshots = snapshots
        self.device_is_default = False
        """True if the last `device_keys` got no device."""

    @cached_property
    def snapshots(self) -> Sequence[Snapshot]:
        return self._snapshots or snapshots_that_answer(self.snapshot)

    def device_keys(self, device: str | None, devices: Iterable[str] | str | None) -> list[str]:
        """Return the keys of the devices with these names; of `DEFAULT_DEVICE` without a name.

        `all` means all GPUs with trained models that can run the precision. Named ones need not be
        able to (see `gap`).

        Raises:
            SnapshotError: There are no heads for one of them, or none at all for the phase.
            InputError: A name is not that of a device, or none of them can run the precision.
        """
        self.device_is_default = device is None and devices is None
        if devices is not None and device is not None:
            raise InputError("give device or devices, not both")
        names: list[Any] = [DEFAULT_DEVICE if device is None else device]
        if devices is not None:
            names = [devices] if isinstance(devices, str) else list(devices)
        if not names:
            raise InputError("the list of devices is empty; name some, or ask for all")
        keys: dict[str, None] = {}
        for name in names:
            if name == "all":
                every = gpus_of(self._manifests, self.phase)
                keys |= dict.fromkeys([key for key in every if not self.gap(key)] or every)
            else:
                keys[key_among(self._manifests, name)] = None
        gaps = [self.gap(key) for key in keys]
        if None not in gaps:
            raise InputError(f"{gaps[0]}")
        return list(keys)

    def gap(self, device: str) -> str | None:
        """Return why a device cannot run the question's precision; None if it can."""
        precision = self._given.get("precision")
        card = card_behind(self._manifests, device)
        return precision and precision_gap(card, precision, self.execution)

    def unable_devices(self) -> dict[str, str]:
        """Return the GPUs with trained models that cannot run the precision, with the reason."""
        gaps = {key: self.gap(key) for key in gpus_of(self._manifests, self.phase)}
        return {key: gap for key, gap in gaps.items() if gap is not None}

    @cached_property
    def _manifests(self) -> Sequence[Manifest]:
        """Manifests of the snapshots that predict, which are read without torch."""
        if self._snapshots:
            return [snapshot.manifest for snapshot in self._snapshots]
        return manifests_that_answer(self.snapshot)

    def snapshot_for(self, device: str) -> Snapshot:
        """Return the first with heads of device and phase; else the last one, for its card."""
        known = (s for s in self.snapshots if self.phase in s.heads.get(device, {}))
        return next(known, self.snapshots[-1])

    def trained(self, device: str, model: str) -> tuple[TrainedHeads, str | None]:
        """Return the heads for a model, and the basis of step times that is not their labels.

        An extension may have heads for models of its source, such as transformers. They are used
        unless labels of a campaign have the precision. Heads of the shipped snapshot do not answer
        for a precision or layout without labels if others published steps of the card.

        Raises:
            SnapshotError: There are no heads for the device and the phase.
        """
        snapshot = self.snapshot_for(device)
        trained = snapshot.trained(device, self.phase)
        of_ranks = rank_key(device).ranks > 1  # their steps include communication
        if snapshot.others_bytes is None or of_ranks:
            return trained, None
        settings, is_campaign = self.settings(trained), snapshot.manifest.campaign is not None
        if is_campaign and settings.precision in {row.precision for row in trained.settings}:
            return trained, None
        card = snapshot.card(device)
        for extension in extension_modules("model_heads") if is_prefixed(model) else ():
            made: tuple[TrainedHeads, str] | None
            made = extension.model_heads(model, trained, snapshot.others, card, settings.precision)
            if made is not None:
                return made
        if not is_campaign and settings[:2] not in {row[:2] for row in trained.settings}:
            return snapshot.others.by_steps(trained, card, self.phase)
        return trained, None

    def settings_traced(self, devices: Iterable[str]) -> list[StepSettings]:
        """Return the settings that a model's steps are traced in."""
        trained = [self.snapshot_for(key).trained(key, self.phase) for key in devices]
        predicted = list(map(self.settings, trained))
        eager = [
            row._replace(execution=Execution.EAGER) for row in predicted
        ]  # ratios are to these
        return list(dict.fromkeys([*eager, *predicted]))

    def settings(self, trained: TrainedHeads) -> StepSettings:
        """Return the question's settings, the rest as in most labels that agree with it.

        Labels of Adam serve AdamW and vice versa: both have the same states and traffic.
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
        usual = (*agreeing, *trained.settings, StepSettings())[0]
        return usual._replace(**given, execution=self.execution)

    def loop_for(
        self, subject: Subject, settings: StepSettings
    ) -> tuple[TrainingLoop | None, str | None]:
        """Return the training loop of a model, and a remark on what its optimizer leaves out.

        The loop is None if it is the usual one of its optimizer. An optimizer of a module's
        parameters is read by its groups.

        Args:
            subject: The model.
            settings: Settings that answer the question; their optimizer is that of the loop unless
                the question has one.
        """
        loop = self._loop
        if loop is None and self.accumulation > 1:
            loop = loop_of(settings.optimizer)
            loop = replace(loop, accumulation_steps=self.accumulation)
        if loop is None or self._optimizer is None or self.phase is Phase.INFER:
            return loop, None
        if subject.module is None:
            return loop, f"The optimizer is taken to hold all parameters of {subject.name}."
        return loop_for(loop, self._optimizer, subject.module)

    def given_settings(self) -> StepSettings:
        """Return the settings that the question names, the rest plain: fp32, contiguous, SGD."""
        return StepSettings(**self._given, execution=self.execution)
