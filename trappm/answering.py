"""From a question to predictions: which snapshot answers, under which settings, what follows."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from learner.heads import USABLE_SHARE, Heads
from learner.predictions import Predictions, StepSettings, TrainedHeads
from learner.workload import Workload
from profiler.errors import InputError, SnapshotError
from profiler.records import MAX_SIZE, METRICS, MemoryFormat, Optimizer, Phase, Precision
from trappm.costs import Run, prices_of, run_of
from trappm.device_names import device_key, memory_mib
from trappm.prediction import Prediction
from trappm.published import snapshots_that_answer

if TYPE_CHECKING:
    from learner.snapshot import Snapshot
    from profiler.static import StaticProfile
    from trappm.subjects import Subject

MIG_PROFILES = ((5.0, "1g.5gb"), (10.0, "2g.10gb"), (20.0, "3g.20gb"), (40.0, "7g.40gb"))
"""DIPPM's rule (Panner Selvam and Brorsson 2023): memory below so many GB fits this part of one."""
MIB_PER_GB = 1e9 / 2**20
LARGEST_BATCH = 65_536
"""Beyond it nobody looks for what still fits."""

_FAMILIES: dict[str, type[enum.StrEnum]] = {
    "precision": Precision,
    "memory_format": MemoryFormat,
    "optimizer": Optimizer,
}


class Question:
    """All of a question but the model and the device."""

    def __init__(
        self,
        *,
        batch_size: int | None = None,
        phase: str = Phase.TRAIN,
        precision: str | None = None,
        memory_format: str | None = None,
        optimizer: str | None = None,
        snapshot: str | Path | None = None,
        epochs: int | None = None,
        samples: int | None = None,
        carbon_g_per_kwh: float | None = None,
    ) -> None:
        """Raises InputError for a setting that there is not, or half of a run."""
        self.batch_size = batch_size
        self.phase = Phase(_member("phase", Phase, phase))
        given = {"precision": precision, "memory_format": memory_format, "optimizer": optimizer}
        self._given: dict[str, Any] = {
            name: _member(name, _FAMILIES[name], value)
            for name, value in given.items()
            if value is not None
        }
        if (epochs is None) != (samples is None):
            raise InputError("a whole run needs both epochs and samples (of one epoch)")
        self._epochs, self._samples, self._carbon = epochs, samples, carbon_g_per_kwh
        self._snapshot = snapshot

    @cached_property
    def snapshots(self) -> list[Snapshot]:
        return snapshots_that_answer(self._snapshot)

    def device_keys(self, device: str | None, devices: Iterable[str] | str | None) -> list[str]:
        """The keys that are meant.

        Raises:
            SnapshotError: there are no heads for one of them, or none at all for the phase.
        """
        known = {key for snapshot in self.snapshots for key in snapshot.heads}
        if devices is None:
            return [device_key(device or self.snapshots[0].source_device, known)]
        if device is not None:
            raise InputError("give device or devices, not both")
        if devices != "all":
            names = [devices] if isinstance(devices, str) else list(devices)
            return [device_key(name, known) for name in names]
        found = sorted(
            {key for s in self.snapshots for key, phases in s.heads.items() if self.phase in phases}
        )
        if not found:
            raise SnapshotError(f"there are no heads for {self.phase} steps; choose another phase")
        return found

    def answer(self, subject: Subject, device: str) -> Prediction:
        """What one step of the model costs on the device of this key.

        Raises:
            SnapshotError: no head for the device and phase.
            InputError: a batch size that the model cannot have.
        """
        snapshot = next((s for s in self.snapshots if device in s.heads), self.snapshots[-1])
        trained = snapshot.trained(device, self.phase)
        settings = self._settings(trained)
        profile = subject.profile()
        batch = self.batch_size or subject.batch_size or profile.graph.fixed_batch_size or 1
        asked = _Asked(subject, profile, snapshot, trained, device, self.phase, settings)
        values = asked.values(batch)
        fits = asked.what_fits(batch, values["intervals"].get("memory_mib"))
        missing = {**asked.missing(values), **fits.pop("missing")}
        run = self._run(device, batch, values)
        if run is None and self._epochs is not None:
            missing["run"] = "it needs step_time_ms"
        return Prediction(
            model=subject.name,
            device=device,
            batch_size=batch,
            phase=self.phase.value,
            precision=settings.precision.value,
            memory_format=settings.memory_format.value,
            optimizer=settings.optimizer.value,
            snapshot=snapshot.id,
            run=run,
            missing=missing,
            remarks=tuple(asked.remarks()),
            simulated_memory=profile.memory(batch),
            memory_source=profile.step_source,
            memory_remark=profile.step_refusal or profile.step_remark,
            **values,
            **fits,
        )

    def _settings(self, trained: TrainedHeads) -> StepSettings:
        """As asked for, and the rest as most labels had it that agree with what was asked for."""
        agreeing = [
            row
            for row in trained.settings
            if all(getattr(row, name) == value for name, value in self._given.items())
        ]
        usual = (*agreeing, *trained.settings, _PLAIN)[0]
        return usual._replace(**self._given)

    def _run(self, device: str, batch: int, values: dict[str, Any]) -> Run | None:
        if self._epochs is None or self._samples is None or values["step_time_ms"] is None:
            return None
        return run_of(
            epochs=self._epochs,
            samples=self._samples,
            batch_size=batch,
            step_time_ms=(values["step_time_ms"], *values["intervals"]["step_time_ms"]),
            energy_j=values["energy_j"],
            carbon_g_per_kwh=self._carbon,
            prices=prices_of(device),
        )


_PLAIN = StepSettings(Precision.FP32, MemoryFormat.CONTIGUOUS, Optimizer.SGD)


_LARGEST: WeakKeyDictionary[Subject, dict[tuple[object, ...], int]] = WeakKeyDictionary()
"""Largest batch sizes that were found: they take a dozen predictions."""


class _Asked:
    """One model on one device, at any batch size."""

    def __init__(
        self,
        subject: Subject,
        profile: StaticProfile,
        snapshot: Snapshot,
        trained: TrainedHeads,
        device: str,
        phase: Phase,
        settings: StepSettings,
    ) -> None:
        self._subject, self._profile, self._snapshot = subject, profile, snapshot
        self._trained, self._device, self._phase = trained, device, phase
        self._settings = settings
        self._no_kernels: str | None = None

    def values(self, batch_size: int) -> dict[str, Any]:
        """What the heads say and what follows from it at once, by the names of `Prediction`."""
        said = self._predict([batch_size])
        found: dict[str, Any] = dict.fromkeys((*METRICS, "energy_j", "samples_per_s"))
        intervals = {}
        for at, metric in enumerate(said.metrics):
            found[metric] = float(said.mean[0, at])
            intervals[metric] = (float(said.low[0, at]), float(said.high[0, at]))
        if found["step_time_ms"] is not None:
            found["samples_per_s"] = 1000 * batch_size / found["step_time_ms"]
            low, high = intervals["step_time_ms"]
            intervals["samples_per_s"] = (1000 * batch_size / high, 1000 * batch_size / low)
            if found["power_w"] is not None:
                found["energy_j"] = found["power_w"] * found["step_time_ms"] / 1000
                power = intervals["power_w"]
                intervals["energy_j"] = (power[0] * low / 1000, power[1] * high / 1000)
        unfamiliar = [m for at, m in enumerate(said.metrics) if said.outside[0, at]]
        return {**found, "intervals": intervals, "unfamiliar": tuple(unfamiliar)}

    def what_fits(self, batch_size: int, memory: tuple[float, float] | None) -> dict[str, Any]:
        """Capacity, probability of running out of it, largest batch size and part of an A100.

        `memory` is the interval of the memory at this batch size, where it is known.
        """
        capacity = memory_mib(self._device)
        found: dict[str, Any] = {"capacity_mib": capacity}
        heads = self._trained.heads
        reason = None
        if memory is None:
            reason = self._no_head("memory_mib")
        elif capacity is None:
            reason = f"the memory of a {self._device} is not known"
        if reason is not None:
            names = ("out_of_memory", "largest_batch_size")
            return {**found, "missing": dict.fromkeys(names, reason)}
        missing = {}
        assert capacity is not None and memory is not None  # noqa: S101, PT018  (a reason otherwise)
        if isinstance(heads, Heads):
            found["out_of_memory"] = float(
                heads.out_of_memory(self._workloads([batch_size]), capacity)[0]
            )
        else:
            missing["out_of_memory"] = "heads of this kind do not tell it"
        fixed = self._profile.graph.fixed_batch_size
        if fixed is None:
            found["largest_batch_size"] = self._largest(USABLE_SHARE * capacity)
        else:
            missing["largest_batch_size"] = f"the file has one batch size only, {fixed}"
        if self._device.startswith("a100"):
            found["mig_profile"] = mig_profile(memory[1])
            if found["mig_profile"] is None:
                missing["mig_profile"] = "the upper bound is more than 40 GB"
        return {**found, "missing": missing}

    def missing(self, values: dict[str, Any]) -> dict[str, str]:
        """Why values are None."""
        found = {}
        for metric in METRICS:
            if values[metric] is None:
                found[metric] = self._no_head(metric)
        if self._no_kernels is not None:
            found["step_time_ms"] = f"its kernels cannot be traced: {self._no_kernels}"
        needed = {"energy_j": ("power_w", "step_time_ms"), "samples_per_s": ("step_time_ms",)}
        for name, parts in needed.items():
            lacking = [part for part in parts if values[part] is None]
            if lacking:
                found[name] = f"it needs {' and '.join(lacking)}"
        return found

    def _no_head(self, metric: str) -> str:
        return f"the snapshot has no {metric} head for {self._phase} steps on {self._device}"

    def remarks(self) -> list[str]:
        if self._settings in self._trained.settings or not self._trained.settings:
            return []
        asked, usual = (", ".join(row) for row in (self._settings, self._trained.settings[0]))
        return [f"no label had these settings ({asked}), most had: {usual}"]

    def _predict(self, batch_sizes: Sequence[int]) -> Predictions:
        return self._snapshot.predict(self._workloads(batch_sizes), self._device, self._phase)

    def _workloads(self, batch_sizes: Sequence[int]) -> list[Workload]:
        kernels = None
        if self._trained.heads.needs_kernels:
            traced = self._subject.kernels(self._settings)
            if isinstance(traced, str):
                self._no_kernels = traced
            else:
                kernels = traced
        return [
            Workload(
                graph=self._profile.graph.at(batch_size),
                precision=self._settings.precision,
                memory_format=self._settings.memory_format,
                optimizer=self._settings.optimizer,
                phase=self._phase,
                step=self._profile.step,
                kernels=kernels,
            )
            for batch_size in batch_sizes
        ]

    def _upper_mib(self, batch_size: int) -> float:
        said = self._predict([batch_size])
        return float(said.high[0, said.metrics.index("memory_mib")])

    def _largest(self, limit_mib: float) -> int:
        """The largest batch size whose upper bound stays below the limit."""
        known = _LARGEST.setdefault(self._subject, {})
        asked = (self._snapshot.id, self._device, self._phase, self._settings)
        if asked not in known:
            known[asked] = self._bisected(limit_mib)
        return known[asked]

    def _bisected(self, limit_mib: float) -> int:
        fits, too_large = 0, 1
        while too_large <= LARGEST_BATCH and self._upper_mib(too_large) <= limit_mib:
            fits, too_large = too_large, 2 * too_large
        while too_large - fits > 1 and fits:
            middle = (fits + too_large) // 2
            if self._upper_mib(middle) <= limit_mib:
                fits = middle
            else:
                too_large = middle
        return min(fits, LARGEST_BATCH, MAX_SIZE)


def mig_profile(upper_mib: float) -> str | None:
    """The smallest part of an A100 of 40 GB that so much memory fits into; None if none does."""
    return next((name for gb, name in MIG_PROFILES if upper_mib < gb * MIB_PER_GB), None)


def _member(name: str, kind: type[enum.StrEnum], value: str) -> enum.StrEnum:
    try:
        return kind(value)
    except ValueError:
        raise InputError(
            f"{name.replace('_', ' ')} is {value!r}; it must be one of: {', '.join(kind)}"
        ) from None
