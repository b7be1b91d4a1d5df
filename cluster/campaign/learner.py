"""The learner of a campaign: encodes its pool, trains its heads, chooses, publishes.

The class has no Ray in it: `learner_handle` makes an actor of it. All randomness comes from the
campaign's seed, so the same labels give the same heads and choices.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from trappm.cluster.campaign.planner import Choice, ChoiceRequest
from trappm.cluster.campaign.training import Judgement, TrainingReport, TransferErrors
from trappm.cluster.spec import MIN_TRAINING_LABELS
from trappm.learner.acquisition import AcquisitionRequest, cold_start, strategy_named
from trappm.learner.acquisition.pool_knowledge import PoolKnowledge, probability_above
from trappm.learner.heads.physics_heads import (
    Heads,
    kernel_head,
    similar_constants,
    train_heads,
)
from trappm.learner.interface import (
    CompiledPair,
    DeviceHeads,
    Predictions,
    TrainedHeads,
    TrainingLabel,
    Workload,
    bounds_of,
    errors_of,
    targets_of,
)
from trappm.learner.paper.encoder import Encoder, make_encoder
from trappm.learner.paper.presets import preset_named
from trappm.learner.physics.devices.known_devices import KnownDevices, known_devices
from trappm.learner.snapshots.compiled_ratios import fit_compiled_ratios
from trappm.learner.snapshots.promotion import promote
from trappm.learner.snapshots.registry import LATEST, Registry
from trappm.learner.snapshots.snapshot import save_snapshot
from trappm.learner.stats.errors import Accuracy, accuracy
from trappm.learner.stats.folds import content_groups
from trappm.profiler.devices.catalogue import CPU, USABLE_SHARE, known_spec
from trappm.profiler.models.families import family_of
from trappm.profiler.records import (
    METRICS,
    Configuration,
    Graph,
    GraphTemplate,
    OnProgress,
    Phase,
    StepSettings,
)
from trappm.profiler.traced_step import Trace
from trappm.store.records import Role

IntArray = npt.NDArray[np.int64]
Errors = dict[str, Accuracy]
"""Errors by metric."""

Train = Callable[[Sequence[TrainingLabel], DeviceHeads | None, OnProgress], DeviceHeads]
"""Trains heads on labels, from the heads of another device or from scratch."""
Judge = Callable[[DeviceHeads, Sequence[TrainingLabel]], Mapping[str, Accuracy]]
"""Returns errors of heads on labels."""

FIRST_METRICS = ("memory_mib", "step_time_ms")
"""Metrics that every device measures, for choices without any label."""

FOLDS = 3
"""Folds of the cross-validation that decides about transfer."""


class EncodedPool:
    """A pool of n configurations with their workloads and embeddings, in one order.

    Args:
        pool: Configurations with their graph templates.
        traces: Traced steps of the configurations (n), as far as there are any.
        encode: Returns an encoder for graphs of these architectures.
    """

    def __init__(
        self,
        pool: Sequence[tuple[Configuration, bytes]],
        traces: Sequence[bytes | None],
        encode: Callable[[Sequence[Graph], Sequence[str]], Encoder],
    ) -> None:
        self.configurations = [configuration for configuration, _ in pool]
        self.index = {c.id: i for i, c in enumerate(self.configurations)}
        """Index of each configuration by its id."""
        self._architectures = [c.architecture for c in self.configurations]
        graphs = _graphs(pool)
        self.encoder = encode(graphs, self._architectures)
        self.embeddings = self.encoder.embed(graphs)
        """Shape (n, width)."""
        made = {data: Trace.from_bytes(data) for data in traces if data is not None}
        self.traced: list[Workload] = []
        """Workloads of the configurations (n), with kernels where there is a step."""
        for c, graph, embedding, data in zip(
            self.configurations, graphs, self.embeddings, traces, strict=True
        ):
            trace = None if data is None or made[data].allocations is None else made[data]
            self.traced.append(
                Workload(
                    graph=graph,
                    precision=c.precision,
                    memory_format=c.memory_format,
                    optimizer=c.optimizer,
                    phase=c.phase,
                    trace=trace,
                    kernels=None if trace is None else trace.kernels,
                    embedding=embedding,
                )
            )

    def workloads(self, card: str) -> Sequence[Workload]:
        """Return workloads for heads of a card (n); without kernels if the card is unknown."""
        return self.traced if known_spec(card) else self._without_kernels

    @cached_property
    def _without_kernels(self) -> Sequence[Workload]:
        return [w if w.kernels is None else replace(w, kernels=None) for w in self.traced]

    @cached_property
    def static_features(self) -> npt.NDArray[np.float64]:
        """Unscaled features of the configurations, shape (n, f)."""
        return np.stack([w.static_features for w in self.traced])

    @cached_property
    def families(self) -> list[str]:
        return [family_of(name) for name in self._architectures]

    @cached_property
    def groups(self) -> list[str]:
        """Group that each configuration is held out with (n); identical models are one group."""
        return content_groups(self._architectures, self.traced)

    def indices(self, names: Iterable[str]) -> IntArray:
        """Return the indices of configurations by their ids."""
        return np.array([self.index[name] for name in names], dtype=np.int64)

    def rows_of(self, labels: Sequence[TrainingLabel]) -> list[int]:
        """Return the indices of the labels' configurations."""
        return [self.index[label.configuration_id] for label in labels]


class CampaignLearner:
    """Encoder and heads of one campaign, over its pool.

    Args:
        preset: Name of the preset of encoder and heads.
        strategy: Name of the acquisition strategy.
        cost: Whether the strategy counts gains per second of measuring.
        source: Source device.
        seed: Seed of the campaign.
        cache: Folder or URL that encoders are read from and written to.
    """

    def __init__(
        self,
        *,
        preset: str,
        strategy: str,
        cost: bool = False,
        source: str,
        seed: int,
        cache: str | Path,
    ) -> None:
        self._preset = preset_named(preset)
        self._has_physical_prior = self._preset.head.physical_prior
        self._strategy = strategy_named(strategy, cost=cost)
        self._source = source
        self._seed = seed
        self._cache = cache
        self._progress = (0, 0)
        self._heads: dict[str, DeviceHeads] = {}
        self._knowledge_by_card: dict[tuple[str, tuple[str, ...]], PoolKnowledge] = {}
        self._scratch_heads: dict[str, DeviceHeads] = {}
        self._labels: Sequence[TrainingLabel] = ()
        self._training_labels: Sequence[TrainingLabel] = ()
        self._cards: Mapping[str, str] = {}

    def progress(self) -> tuple[int, int]:
        """Return parts done and parts in all of the current call; another thread may ask."""
        return self._progress

    def set_pool(
        self,
        pool: Sequence[tuple[Configuration, bytes]],
        traces: Sequence[bytes | None] | None = None,
    ) -> None:
        """Pre-train the encoder on the pool or load it; arguments as of `EncodedPool`."""
        encode = partial(
            make_encoder,
            preset=self._preset.encoder,
            pretrained=True,
            seed=self._seed,
            cache=Registry(self._cache),
            on_progress=self._note,
        )
        self._pool = EncodedPool(pool, traces or [None] * len(pool), encode)

    def fit(self, labels: Sequence[TrainingLabel]) -> TrainingReport:
        """Train the source's heads, then the other devices' heads from the source's weights.

        Heads that started from the source's are compared with heads from scratch.

        Args:
            labels: Labels of all devices; a run out of memory is a lower bound of its memory.
        """
        labels = [
            label
            for label in labels
            if label.memory_above_mib is not None or any(v is not None for v in label.values)
        ]
        self._labels = labels
        self._training_labels = [label for label in labels if label.role == Role.TRAIN]
        self._cards = {label.device: label.card or label.device for label in labels}
        counts = Counter(label.device for label in self._training_labels)
        devices = [device for device in counts if counts[device] >= MIN_TRAINING_LABELS]
        devices.sort(key=lambda device: (device != self._source, device))
        trainings = max(1, 2 * len(devices) - 1)
        parts = (_part(self._note, number, trainings) for number in itertools.count())
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
                self._scratch_heads[device] = self._train(training, None, next(parts))
                scratch, _ = self._judge(self._scratch_heads[device], held_out)
                transfer[device] = {
                    metric: TransferErrors(errors[device][metric]["mape"], scratch[metric]["mape"])
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
        """Choose what to measure next on a device, with reasons; no label is needed."""
        if not request.count:
            return []
        heads = self._heads.get(request.device) or self._heads.get(self._source)
        pool = self._pool
        # Held-out configurations are left out, so that no choice suits the evaluation set.
        rows = np.unique(pool.indices([*request.candidates, *request.known]))
        card = self._cards.get(request.device) or request.card or request.device
        workloads = [pool.workloads(card)[i] for i in rows.tolist()]
        predictions = None if heads is None else heads.predict(workloads)
        others = self._target_constants(request.device, card, workloads)
        knowledge = self._knowledge(card, others).of_rows(rows)

        def at(names: Iterable[str]) -> IntArray:
            return np.searchsorted(rows, pool.indices(names))

        noise_factor = np.ones(len(rows))
        noise_factor[at(request.unsteady)] = (1.0 + np.array([*request.unsteady.values()])) ** 2
        acquisition = AcquisitionRequest(
            embeddings=pool.embeddings[rows],
            static_features=pool.static_features[rows],
            labelled=at(request.known),
            candidates=at(request.candidates),
            count=request.count,
            generator=np.random.default_rng(list(request.seed)),
            covariances=list(knowledge.covariances.values()) if self._has_physical_prior else [],
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

    def _target_constants(
        self, device: str, card: str, workloads: Sequence[Workload]
    ) -> KnownDevices | None:
        """Return step-time constants that a target may have, given the source's labels.

        None for the source itself, without kernels, and unless both devices are known GPUs.
        """
        cards = card, self._cards.get(self._source, self._source)
        if (
            device == self._source
            or not self._has_physical_prior
            or any(known_spec(name) in (None, CPU) for name in cards)
            or all(w.kernels is None for w in workloads)
        ):
            return None
        heads, known = self._heads.get(self._source), known_devices()
        head = None if heads is None else kernel_head(heads)
        return known if head is None else replace(known, centre=head.prior.constants)

    def _knowledge(self, card: str, others: KnownDevices | None) -> PoolKnowledge:
        """Return knowledge of the metrics that are labelled; before any label, time and memory."""
        known = {
            metric
            for label in self._training_labels
            for metric, value in zip(METRICS, label.values, strict=True)
            if value is not None
        }
        metrics = tuple(sorted(known or FIRST_METRICS))
        if others is None and (card, metrics) in self._knowledge_by_card:
            return self._knowledge_by_card[card, metrics]
        workloads, generator = self._pool.workloads(card), self._generator(2)
        knowledge = PoolKnowledge.of(workloads, metrics, known_spec(card), generator, others=others)
        if others is None:  # which change with the source's labels
            self._knowledge_by_card[card, metrics] = knowledge
        return knowledge

    def _failure(
        self,
        request: ChoiceRequest,
        heads: DeviceHeads | None,
        workloads: Sequence[Workload],
        knowledge: PoolKnowledge,
    ) -> npt.NDArray[np.float64] | None:
        """Return the probability that workloads run out of memory, shape (n); None if unknown.

        The capacity is the smallest memory that was exceeded, or the device's known memory.
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

    def publish(
        self,
        folder: Path,
        fields: Mapping[str, Any],
        pairs: Sequence[CompiledPair] = (),
        registry: str | Path | None = None,
    ) -> tuple[str, tuple[str, ...]]:
        """Save encoder and heads as a snapshot, and push it to the registry.

        Its `parent` is the latest in the registry. A repeated call continues one that was cut off.

        Args:
            folder: Folder of this host's snapshots.
            fields: Further fields of the manifest.
            pairs: Steps that were measured eager and compiled.
            registry: Folder or URL (default: `folder`).

        Returns:
            The id of the snapshot, and remarks on it.

        Raises:
            SnapshotError: The folder or the registry cannot be written.
        """
        shared = Registry(registry or folder)
        before = shared.history(LATEST)
        notes, errors = self._leave_lost_transfer({**(fields.get("errors") or {})})
        ratios, about_ratios = self._fit_compiled_ratios(pairs)
        info = save_snapshot(
            folder,
            encoder=self._pool.encoder,
            heads={device: self._by_phase(device) for device in self._heads},
            source_device=self._source,
            preset=self._preset,
            labels=self._training_labels,
            fields={
                **fields,
                "compiled": ratios,
                "errors": {
                    device: dict.fromkeys(self._by_phase(device), judged)
                    for device, judged in errors.items()
                },
                "cards": {device: self._cards.get(device, device) for device in self._heads},
                "families": sorted(set(self._pool.families)),
                "parent": before[-1].snapshot if before else None,
            },
        )
        if registry is not None:
            shared.push(info.folder)
        return info.id, (*notes, *about_ratios)

    def _fit_compiled_ratios(
        self, pairs: Sequence[CompiledPair]
    ) -> tuple[dict[str, dict[Phase, dict[str, Any]]], list[str]]:
        """Return the manifest's ratios of compiled steps, and lines about them."""
        names = list(self._pool.index)
        workloads = dict(zip(names, self._pool.traced, strict=True))
        families, groups = (
            dict(zip(names, values, strict=True))
            for values in (self._pool.families, self._pool.groups)
        )
        ratios, lines = fit_compiled_ratios(pairs, workloads, families, groups)
        dumped = {
            device: {phase: ratio.model_dump() for phase, ratio in by_phase.items()}
            for device, by_phase in ratios.items()
        }
        return dumped, lines

    def _leave_lost_transfer(self, errors: dict[str, Any]) -> tuple[tuple[str, ...], Any]:
        """Replace heads by those from scratch where cross-validation finds these better.

        Returns:
            A line per device whose heads were replaced, and the errors of the present heads.
        """
        notes = []
        self._note(0, 0)
        for number, device in enumerate(self._scratch_heads):
            training = [x for x in self._training_labels if x.device == device]
            judged = cross_validate(
                training,
                [self._pool.groups[i] for i in self._pool.rows_of(training)],
                self._heads[self._source],
                self._train,
                lambda heads, labels: self._judge(heads, labels)[0],
                _part(self._note, number, len(self._scratch_heads)),
            )
            heads, lost = better_heads(self._heads[device], self._scratch_heads[device], judged)
            if not lost:
                continue
            self._heads[device] = heads
            held_out = [x for x in self._labels if x.device == device and x.role == Role.EVALUATE]
            errors[device] = self._judge(heads, held_out)[0]
            reasons = ", ".join(f"{metric} ({judged[metric]})" for metric in lost)
            notes.append(f"{device}: published from scratch, as transfer lost: {reasons}")
        return tuple(notes), errors

    def promote(self, registry: str | Path, snapshot_id: str) -> str | None:
        """Make a snapshot the latest unless it is worse; return a remark on it, if any."""
        promotion = promote(Registry(registry), LATEST, snapshot_id)
        return promotion.remark if promotion.moved else promotion.message

    def _by_phase(self, device: str) -> dict[Phase, TrainedHeads]:
        """Return a device's heads for each phase that its labels had; one fit serves both."""
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
        at = self._pool.rows_of(labels)
        card = self._cards[labels[0].device]
        workloads = self._pool.workloads(card)
        return train_heads(
            [workloads[i] for i in at],
            targets_of(labels),
            above=bounds_of(labels),
            errors=errors_of(labels),
            spec=known_spec(card),
            similar=similar_constants(card),
            groups=[self._pool.groups[i] for i in at],
            preset=self._preset.head,
            generator=self._generator(1),
            init=init,
            on_progress=on_progress,
        )

    def _judge(
        self, heads: DeviceHeads, labels: Sequence[TrainingLabel]
    ) -> tuple[Errors, list[Judgement]]:
        """Return errors by metric, and each prediction with the measured value."""
        if not labels:
            return {}, []
        at = self._pool.rows_of(labels)
        workloads = self._pool.workloads(self._cards[labels[0].device])
        predictions = heads.predict([workloads[i] for i in at])
        targets = targets_of(labels)
        errors: Errors = {}
        judgements = []
        for column, metric in enumerate(predictions.metrics):
            measured = targets[:, list(METRICS).index(metric)]
            known = np.flatnonzero(~np.isnan(measured)).tolist()
            if not known:
                continue
            predicted = predictions.median[:, column]
            errors[metric] = accuracy(
                measured, predicted, predictions.low[:, column], predictions.high[:, column]
            )
            judgements += [
                Judgement(
                    device=labels[i].device,
                    architecture=self._pool.configurations[at[i]].architecture,
                    metric=metric,
                    measured=float(measured[i]),
                    predicted=float(predicted[i]),
                )
                for i in known
            ]
        return errors, judgements

    def _generator(self, purpose: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, purpose])

    def _note(self, done: int, total: int) -> None:
        self._progress = (done, total)


def cross_validate(
    labels: Sequence[TrainingLabel],
    groups: Sequence[str],
    source: DeviceHeads,
    train: Train,
    judge: Judge,
    on_progress: OnProgress,
) -> dict[str, TransferErrors]:
    """Return the mean errors of transferred heads and of heads from scratch, by metric.

    Folds of the target's training labels (n) hold whole groups of architectures (n) out, and the
    evaluation set has no part. The source's heads, from which transfer starts, have seen the
    architectures of a fold, which favors transfer.
    """
    names = sorted(set(groups))
    folds: dict[str, list[tuple[int, float, float]]] = {}
    for fold in range(FOLDS):
        out = set(names[fold::FOLDS])
        held_out = [label for label, group in zip(labels, groups, strict=True) if group in out]
        rest = [label for label, group in zip(labels, groups, strict=True) if group not in out]
        if len(rest) < MIN_TRAINING_LABELS or not held_out:
            continue
        transferred, scratch = (
            judge(train(rest, init, _part(on_progress, 2 * fold + at, 2 * FOLDS)), held_out)
            for at, init in enumerate((source, None))
        )
        for metric in transferred.keys() & scratch.keys():
            errors = transferred[metric]["mape"], scratch[metric]["mape"]
            folds.setdefault(metric, []).append((transferred[metric]["count"], *errors))
    means = {}
    for metric, parts in folds.items():
        counts, *errors_of = zip(*parts, strict=True)
        means[metric] = TransferErrors(*(float(np.average(e, weights=counts)) for e in errors_of))
    return means


def better_heads(
    transferred: DeviceHeads, scratch: DeviceHeads, errors: Mapping[str, TransferErrors]
) -> tuple[DeviceHeads, list[str]]:
    """Return the better heads per metric, and the metrics whose heads are from scratch.

    Heads of another kind, which cannot be divided, are from scratch where most metrics lost.
    """
    lost = sorted(metric for metric, e in errors.items() if e.transferred > e.from_scratch)
    if not lost:
        return transferred, []
    if isinstance(transferred, Heads) and isinstance(scratch, Heads):
        better = {metric: scratch.heads[metric] for metric in lost if metric in scratch.heads}
        return replace(transferred, heads={**transferred.heads, **better}), lost
    return (scratch, sorted(errors)) if 2 * len(lost) > len(errors) else (transferred, [])


def _over_metrics(predictions: Predictions) -> npt.NDArray[np.float64]:
    """Return one uncertainty per graph: root mean square over metrics, each in its own scale."""
    scale = np.maximum(predictions.disagreement.mean(axis=0), 1e-9)
    return np.asarray(np.sqrt(np.mean((predictions.disagreement / scale) ** 2, axis=1)))


def _step_times(
    predictions: Predictions | None, knowledge: PoolKnowledge
) -> npt.NDArray[np.float64] | None:
    """Return step times in ms from heads or else the prior, shape (n); None without either."""
    if predictions is not None and "step_time_ms" in predictions.metrics:
        return predictions.median[:, predictions.metrics.index("step_time_ms")]
    estimate = knowledge.estimates.get("step_time_ms")
    return None if estimate is None else estimate.median


def _part(on_progress: OnProgress, number: int, parts: int) -> OnProgress:
    """Return a callback that reports one of several equal parts as progress of the whole."""
    return lambda done, total: on_progress(number * total + done, parts * total)


def _graphs(pool: Sequence[tuple[Configuration, bytes]]) -> list[Graph]:
    """Return the graphs; equal graphs are one object, so that work on them is shared."""
    made: dict[tuple[bytes, int], Graph] = {}
    for c, template in pool:
        if (template, c.batch_size) not in made:
            made[template, c.batch_size] = GraphTemplate.from_bytes(template).at(c.batch_size)
    return [made[template, c.batch_size] for c, template in pool]
