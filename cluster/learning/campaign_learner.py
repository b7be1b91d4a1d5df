"""What the learner does for a campaign: encode its pool, train its heads, choose, publish.

Plain Python without Ray: `actors.learner` puts it into a process of its own. Everything that
is random comes from the campaign's seed, so the same labels give the same heads and choices.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from trappm.cluster.interfaces import (
    Choice,
    ChoiceRequest,
    PublishedSnapshot,
)
from trappm.cluster.learning.encoded_pool import EncodedPool
from trappm.cluster.learning.judging import Errors, judged_by
from trappm.cluster.learning.transfer_choice import (
    LEAST_TRAINING_LABELS,
    better_heads,
    cross_validated,
)
from trappm.cluster.profiles.step_profiles import StepKey
from trappm.cluster.scheduler.training_report import (
    Judgement,
    TrainingReport,
    TransferErrors,
    difference_of,
)
from trappm.learner.acquisition import AcquisitionRequest, cold_start, strategy_named
from trappm.learner.acquisition.pool_knowledge import PoolKnowledge, probability_above
from trappm.learner.acquisition.strategies import NEED_GRADIENTS
from trappm.learner.heads.device_heads import Heads, train_heads
from trappm.learner.heads.predictions import DeviceHeads, Predictions, StepSettings, TrainedHeads
from trappm.learner.networks.presets import preset_named
from trappm.learner.physics.device_specs import CPU, known_spec
from trappm.learner.physics.devices.joint_fit import Distribution, Evidence
from trappm.learner.physics.devices.known_devices import known_devices, measured_evidence
from trappm.learner.physics.step_time_prior import StepTimePrior
from trappm.learner.snapshots.registry import LATEST, Registry
from trappm.learner.snapshots.regressions import promote
from trappm.learner.snapshots.snapshot import save_snapshot
from trappm.learner.training_label import TrainingLabel, bounds_of, targets_of
from trappm.learner.workload import Workload
from trappm.profiler.devices.capacity import USABLE_SHARE
from trappm.profiler.kernels.kernel_measurement import KernelMeasurement
from trappm.profiler.progress import OnProgress
from trappm.profiler.records import METRICS, Configuration, Phase
from trappm.store.records import Role

IntArray = npt.NDArray[np.int64]
FIRST_METRICS = ("memory_mib", "step_time_ms")
"""What every device tells: what a choice without any label has to serve."""


class CampaignLearner:
    """Encoder and heads of one campaign, over its pool."""

    def __init__(self, *, preset: str, strategy: str, source: str, seed: int, cache: Path) -> None:
        self._preset = preset_named(preset)
        self._knows_physics = self._preset.head.physical_prior
        self._strategy = strategy_named(strategy)
        self._source = source
        self._seed = seed
        self._cache = cache
        self._heads: dict[str, DeviceHeads] = {}
        self._known: dict[tuple[str, tuple[str, ...]], PoolKnowledge] = {}
        self._scratch: dict[str, DeviceHeads] = {}
        self._labels: Sequence[TrainingLabel] = ()
        self._training_labels: Sequence[TrainingLabel] = ()
        self._cards: Mapping[str, str] = {}
        self._kernels: Mapping[str, Sequence[KernelMeasurement]] = {}

    def set_pool(
        self,
        pool: Sequence[tuple[Configuration, bytes]],
        on_progress: OnProgress,
        steps: Mapping[tuple[str, int], bytes] | None = None,
        traced: Mapping[StepKey, bytes] | None = None,
    ) -> None:
        """Takes the pool and pre-trains the encoder on all of it, labelled or not.

        An encoder that was trained on the same graphs before is read back instead.

        Args:
            pool: configurations with their graph templates.
            on_progress: called with steps done and steps at most.
            steps: step profiles by architecture and input size, where there are any.
            traced: those in settings of their own, where there are any.
        """
        self._pool = EncodedPool.of(
            pool,
            steps or {},
            traced or {},
            preset=self._preset.encoder,
            seed=self._seed,
            cache=self._cache,
            on_progress=on_progress,
        )

    @property
    def embeddings(self) -> npt.NDArray[np.float32]:
        """Of the pool, in its order (n, width)."""
        return self._pool.embeddings

    def fit(
        self,
        labels: Sequence[TrainingLabel],
        on_progress: OnProgress,
        kernels: Mapping[str, Sequence[KernelMeasurement]] | None = None,
    ) -> TrainingReport:
        """Trains the source's heads, then the other devices' heads from the source's weights.

        A run that ran out of memory teaches the memory head what it needs at least. Heads that
        started from the source's are judged beside heads from scratch. Kernels of a device move
        where its step times begin.
        """
        self._kernels = kernels or {}
        labels = [
            label
            for label in labels
            if label.memory_above_mib is not None or any(v is not None for v in label.values)
        ]
        self._labels = labels
        self._training_labels = [label for label in labels if label.role == Role.TRAIN]
        self._cards = {label.device: label.card or label.device for label in labels}
        counts = Counter(label.device for label in self._training_labels)
        devices = [device for device in counts if counts[device] >= LEAST_TRAINING_LABELS]
        devices.sort(key=lambda device: (device != self._source, device))
        trainings = max(1, 2 * len(devices) - 1)
        parts = (_part(on_progress, number, trainings) for number in itertools.count())
        errors: dict[str, Errors] = {}
        transfer: dict[str, dict[str, TransferErrors]] = {}
        evaluation: list[Judgement] = []
        for device in devices:
            training = [x for x in self._training_labels if x.device == device]
            held_out = [x for x in labels if x.device == device and x.role == Role.EVALUATE]
            init = None if device == self._source else self._heads.get(self._source)
            self._heads[device] = self._train(training, init, next(parts))
            errors[device], judgements = self._judge(self._heads[device], held_out)
            evaluation += judgements
            if init is not None:
                self._scratch[device] = self._train(training, None, next(parts))
                scratch, others = self._judge(self._scratch[device], held_out)
                transfer[device] = {
                    metric: TransferErrors(
                        errors[device][metric]["mape"],
                        scratch[metric]["mape"],
                        difference_of(others, judgements, device, metric).chance,
                    )
                    for metric in errors[device]
                    if metric in scratch
                }
        return TrainingReport(
            labels=dict(counts),
            devices=cast("Mapping[str, Mapping[str, Mapping[str, float | None]]]", errors),
            transfer=transfer,
            evaluation=evaluation,
        )

    def choose(self, request: ChoiceRequest) -> list[Choice]:
        """Picks what to measure next on a device, with reasons; without any label as well."""
        if not request.count:
            return []
        heads = self._heads.get(request.device) or self._heads.get(self._source)
        pool = self._pool
        # What is held out is left out here too: nothing is chosen to suit the evaluation set.
        rows = np.unique(pool.indices([*request.candidates, *request.known]))
        card = self._cards.get(request.device) or request.card or request.device
        workloads = [pool.workloads(card)[i] for i in rows.tolist()]
        predictions = None if heads is None else heads.predict(workloads)
        others = self._others(request.device, card, workloads)
        knowledge = self._knowledge(card, others).of_rows(rows)

        def at(names: Iterable[str]) -> IntArray:
            return np.searchsorted(rows, pool.indices(list(names)))

        noise_factor = np.ones(len(rows))
        noise_factor[at(request.unsteady)] = (1.0 + np.array([*request.unsteady.values()])) ** 2
        gradients = None
        if heads is not None and self._strategy.name in NEED_GRADIENTS:
            gradients = heads.gradients(workloads)
        acquisition = AcquisitionRequest(
            embeddings=pool.embeddings[rows],
            static_features=pool.static_features[rows],
            labelled=at(request.known),
            candidates=at(request.candidates),
            count=request.count,
            generator=np.random.default_rng(list(request.seed)),
            families=[pool.families[i] for i in rows.tolist()],
            covariances=list(knowledge.covariances.values()) if self._knows_physics else [],
            gradients=gradients,
            uncertainty=None if predictions is None else _over_metrics(predictions),
            predicted_cost=_step_times(predictions, knowledge),
            failure=self._failure(request, heads, workloads, knowledge),
            noise_factor=noise_factor,
            taught=others is not None,
        )
        strategy = self._strategy if heads is not None else cold_start(self._strategy)
        return [
            Choice(pool.configurations[rows[pick.index]].id, pick.reason)
            for pick in strategy.select(acquisition)
        ]

    def _others(self, device: str, card: str, workloads: Sequence[Workload]) -> Distribution | None:
        """What other devices, and labels of the source, say of a target's step times.

        None of the source itself, without kernels, which alone tell how devices differ, and
        unless both are known GPUs: it is these of which that is known.
        """
        cards = card, self._cards.get(self._source, self._source)
        if (
            device == self._source
            or not self._knows_physics
            or any(known_spec(name) in (None, CPU) for name in cards)
            or all(w.kernels is None for w in workloads)
        ):
            return None
        heads, known = self._heads.get(self._source), known_devices()
        head = heads.heads.get("step_time_ms") if isinstance(heads, Heads) else None
        if head is None or not isinstance(head.prior, StepTimePrior):
            return known
        return replace(known, centre=head.prior.constants)

    def _knowledge(self, card: str, others: Distribution | None) -> PoolKnowledge:
        """Of the metrics that labels have had so far; before any label, of time and memory."""
        known = {
            metric
            for label in self._training_labels
            for metric, value in zip(METRICS, label.values, strict=True)
            if value is not None
        }
        metrics = tuple(sorted(known or FIRST_METRICS))
        if others is None and (card, metrics) in self._known:
            return self._known[card, metrics]
        workloads, generator = self._pool.workloads(card), self._generator(2)
        knowledge = PoolKnowledge.of(workloads, metrics, known_spec(card), generator, others=others)
        if others is None:  # which change with the source's labels
            self._known[card, metrics] = knowledge
        return knowledge

    def _failure(
        self,
        request: ChoiceRequest,
        heads: DeviceHeads | None,
        workloads: Sequence[Workload],
        knowledge: PoolKnowledge,
    ) -> npt.NDArray[np.float64] | None:
        """The probability that runs of these workloads die of the device's memory (n); None where
        that is not known.

        The memory is what runs died of, or what is known of the device.
        """
        bounds = [
            label.memory_above_mib
            for label in self._training_labels
            if label.device == request.device and label.memory_above_mib is not None
        ]
        capacity = min(bounds, default=request.capacity_mib)
        if capacity is None:
            return None
        if isinstance(heads, Heads) and "memory_mib" in heads.metrics:
            return heads.out_of_memory(workloads, capacity)
        estimate = knowledge.estimates.get("memory_mib")
        return None if estimate is None else probability_above(estimate, USABLE_SHARE * capacity)

    def publish(self, registry: Path, fields: Mapping[str, Any]) -> PublishedSnapshot:
        """Saves encoder and heads as a snapshot; its `parent` is the latest in the registry."""
        before = Registry(registry).history(LATEST)
        notes, errors = self._leave_lost_transfer({**(fields.get("errors") or {})})
        fields = {**fields, "errors": errors}
        info = save_snapshot(
            registry,
            encoder=self._pool.encoder,
            heads={device: self._by_phase(device) for device in self._heads},
            source_device=self._source,
            preset=self._preset,
            labels=self._training_labels,
            fields={
                **fields,
                "cards": {device: self._cards.get(device, device) for device in self._heads},
                "families": sorted(set(self._pool.families)),
                "parent": before[-1].snapshot if before else None,
            },
        )
        return PublishedSnapshot(info.id, info.folder.name, info.manifest.to_json(), notes)

    def _leave_lost_transfer(self, errors: dict[str, Any]) -> tuple[tuple[str, ...], Any]:
        """Takes heads from scratch where cross-validation says that they are better.

        Returns:
            A line for each device where it does, and the errors of the heads that are there now.
        """
        notes = []
        source = self._heads.get(self._source)
        for device in [d for d in self._scratch if source is not None and d != self._source]:
            training = [x for x in self._training_labels if x.device == device]
            at = self._pool.indices([label.configuration_id for label in training]).tolist()
            judged = cross_validated(
                training,
                [self._pool.groups[i] for i in at],
                self._heads[self._source],
                lambda labels, init: self._train(labels, init, lambda done, total: None),
                lambda heads, labels: self._judge(heads, labels)[0],
            )
            heads, lost = better_heads(self._heads[device], self._scratch[device], judged)
            if not lost:
                continue
            self._heads[device] = heads
            held_out = [x for x in self._labels if x.device == device and x.role == Role.EVALUATE]
            errors[device] = self._judge(heads, held_out)[0]
            reasons = ", ".join(f"{metric} ({judged[metric]})" for metric in lost)
            notes.append(f"{device}: published from scratch, as transfer lost: {reasons}")
        return tuple(notes), errors

    def promote(self, registry: Path, snapshot_id: str) -> str | None:
        """Calls it the latest one unless something is lost by it; a line about what speaks against
        it, else None."""
        promotion = promote(Registry(registry), LATEST, snapshot_id)
        return promotion.remark if promotion.moved else promotion.message

    def _by_phase(self, device: str) -> dict[Phase, TrainedHeads]:
        """A device's heads under each phase that its labels had; one fit serves both."""
        had: dict[Phase, Counter[StepSettings]] = {}
        for label in self._training_labels:
            if label.device == device:
                c = self._pool.configurations[self._pool.index[label.configuration_id]]
                settings = StepSettings(c.precision, c.memory_format, c.optimizer)
                had.setdefault(c.phase, Counter())[settings] += 1
        return {
            phase: TrainedHeads(self._heads[device], tuple(s for s, _ in count.most_common()))
            for phase, count in had.items()
        }

    def _train(
        self, labels: Sequence[TrainingLabel], init: DeviceHeads | None, on_progress: OnProgress
    ) -> DeviceHeads:
        at = self._pool.indices([label.configuration_id for label in labels]).tolist()
        card = self._cards[labels[0].device]
        workloads, spec = self._pool.workloads(card), known_spec(card)
        evidence: list[Evidence] = []
        if spec not in (None, CPU):
            evidence = measured_evidence(spec, self._kernels.get(labels[0].device, ()))
        return train_heads(
            [workloads[i] for i in at],
            targets_of(labels),
            above=bounds_of(labels),
            spec=spec,
            evidence=evidence,
            groups=[self._pool.groups[i] for i in at],
            preset=self._preset.head,
            generator=self._generator(1),
            init=init,
            on_progress=on_progress,
        )

    def _judge(
        self, heads: DeviceHeads, labels: Sequence[TrainingLabel]
    ) -> tuple[Errors, list[Judgement]]:
        """Errors by metric, and each prediction beside what was measured."""
        if not labels:
            return {}, []
        at = self._pool.indices([label.configuration_id for label in labels]).tolist()
        workloads = self._pool.workloads(self._cards[labels[0].device])
        architectures = [self._pool.configurations[i].architecture for i in at]
        return judged_by(heads, [workloads[i] for i in at], labels, architectures)

    def _generator(self, purpose: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, purpose])


def _over_metrics(predictions: Predictions) -> npt.NDArray[np.float64]:
    """One uncertainty for each graph: the root mean square over metrics, each in its own scale."""
    scale = np.maximum(predictions.disagreement.mean(axis=0), 1e-9)
    return np.asarray(np.sqrt(np.mean((predictions.disagreement / scale) ** 2, axis=1)))


def _step_times(
    predictions: Predictions | None, knowledge: PoolKnowledge
) -> npt.NDArray[np.float64] | None:
    """In ms (n), without a head for them those of the prior; None where there is neither."""
    if predictions is not None and "step_time_ms" in predictions.metrics:
        return predictions.median[:, predictions.metrics.index("step_time_ms")]
    estimate = knowledge.estimates.get("step_time_ms")
    return None if estimate is None else estimate.median


def _part(on_progress: OnProgress, number: int, parts: int) -> OnProgress:
    """Progress of one of several equal parts, as progress of the whole."""
    return lambda done, total: on_progress(number * total + done, parts * total)
