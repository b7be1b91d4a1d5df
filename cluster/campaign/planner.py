"""The pool of a campaign, and assignments that are drawn or chosen from it for a round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from trappm.cluster.spec import ALL, MIN_TRAINING_LABELS, CampaignSpec
from trappm.cluster.trace_tasks import steps_of
from trappm.learner.interface import Workload
from trappm.learner.stats.errors import split_architectures
from trappm.learner.stats.folds import content_groups
from trappm.profiler.devices.catalogue import (
    card_name,
    device_capacity_mib,
    possible_runs,
    rank_key,
)
from trappm.profiler.errors import CampaignError, InputError
from trappm.profiler.memory.simulation import memory_of
from trappm.profiler.models.known_names import model_of
from trappm.profiler.models.pool import build_pool
from trappm.profiler.records import (
    Configuration,
    Execution,
    GraphTemplate,
    MemoryFormat,
    Outcome,
    Pair,
    Phase,
    Precision,
    is_cpu_device,
)
from trappm.profiler.traced_step import Refusal, Trace, TraceKey
from trappm.store import Assignment, AssignmentState, Store
from trappm.store.records import Purpose, Role

PURPOSES = tuple(Purpose)


def pool_of(spec: CampaignSpec, store: Store) -> list[Configuration]:
    """Return the configurations that a campaign file describes, or those of its named pool.

    Raises:
        UnknownArchitectureError: A name or glob in the file matches no architecture.
        InputError: There is no pool of this name.
    """
    return store.pools.get(spec.pool) if isinstance(spec.pool, str) else build_pool(spec.pool)


def drop_refused(pool: Sequence[Configuration], store: Store) -> list[Configuration]:
    """Return the configurations whose models have a graph, or were not traced yet."""
    states = store.traces.states(steps_of(pool))
    with_graph = {_pair(key) for key, state in states.items() if state.graph_hash}
    refused = set(map(_pair, states)) - with_graph
    return [c for c in pool if _pair_of(c) not in refused]


def first_steps(configurations: Iterable[Configuration]) -> dict[tuple[Pair, Phase], TraceKey]:
    """Return the plainest step of each architecture, input size and phase."""
    first: dict[tuple[Pair, Phase], TraceKey] = {}
    for key in sorted(steps_of(configurations), key=_plainness):
        first.setdefault((_pair(key), key.phase), key)
    return first


def _plainness(key: TraceKey) -> tuple[int, int, int]:
    """Return a rank: fp32 comes first, then contiguous, then eager ones."""
    precision, memory_format, execution, _ = key.settings
    return (
        [*Precision].index(precision),
        [*MemoryFormat].index(memory_format),
        [*Execution].index(execution),
    )


def check_stop(spec: CampaignSpec) -> None:
    """Raise InputError for a budget of labels that ends before the first training."""
    budget = None if spec.stop is None else spec.stop.labels
    first = sum(sum(spec.shares(device)[:2]) for device in spec.devices.keys)
    if budget is not None and budget < first:
        raise InputError(
            f"the stop rule labels is {budget}, and evaluation and initial alone ask for {first}; "
            "raise it or lower them"
        )


def groups_of(pool: Sequence[Configuration], graphs: Mapping[Pair, bytes]) -> list[str]:
    """Return the group that each configuration is held out with (n).

    Architectures with identical layers are one group.
    """
    workloads = {
        architecture: Workload(graph=GraphTemplate.from_bytes(data).at(1))
        for (architecture, _), data in graphs.items()
    }
    names = [c.architecture for c in pool]
    return content_groups(names, [workloads[name] for name in names])


def check_budget(
    spec: CampaignSpec, pool: Sequence[Configuration], groups: Sequence[str] | None = None
) -> set[str]:
    """Return the architectures to hold out of a pool of n configurations.

    Each is held out with its group (n): by default its model, however trained.

    Raises:
        InputError: The pool is too small for the budget.
    """
    generator = np.random.default_rng([spec.seed, 0])
    if groups is None:
        groups = [model_of(c.architecture) for c in pool]
    held_out = split_architectures(pool, spec.evaluation.architecture_share, generator, groups)
    for device in spec.devices.keys:
        wanted, *others = spec.shares(device)
        training = sum(others)
        possible = _possible(device, pool)
        initial = spec.initial.source
        needed = 2 * MIN_TRAINING_LABELS
        if device == spec.devices.source and initial < needed and not all(map(_is_eager, possible)):
            raise InputError(
                f"initial: source is {initial}, half of it compiled steps; heads need "
                f"{MIN_TRAINING_LABELS} eager ones, so {needed} or more"
            )
        kept_back = sum(c.architecture in held_out for c in possible)
        if spec.strategy == ALL:
            continue  # how large the pool is with its graphs is known only then
        if wanted > kept_back or training > len(possible) - kept_back:
            raise InputError(
                f"the budget for {device} cannot be met: it asks for {wanted} evaluation and "
                f"{training} training configurations, and the pool has {kept_back} and "
                f"{len(possible) - kept_back} that it can run; lower the budget, widen the pool, "
                f"or change evaluation.architecture_share ({spec.evaluation.architecture_share:g})"
            )
    return held_out


def _possible(device: str, pool: Sequence[Configuration]) -> list[Configuration]:
    """Return the configurations that a device can run; compiled ones follow eager ones."""
    runs, eager = possible_runs(device), set(filter(_is_eager, pool))
    return [
        c for c in pool
        if _run(c) in runs and (_is_eager(c) or replace(c, execution=Execution.EAGER) in eager)
    ]  # fmt: skip


def with_whole_pool(spec: CampaignSpec, store: Store) -> CampaignSpec:
    """Return a campaign of strategy `all` with the budget of its pool; others are unchanged.

    Raises:
        InputError: The pool is too small to train heads.
    """
    if spec.strategy != ALL:
        return spec
    pool = pool_of(spec, store)
    held_out, possible = check_budget(spec, pool), _possible(spec.devices.source, pool)
    kept_back = sum(c.architecture in held_out for c in possible)
    if len(possible) - kept_back < MIN_TRAINING_LABELS:
        raise InputError(
            f"strategy all needs {MIN_TRAINING_LABELS} configurations to train on; the pool has "
            f"{len(possible) - kept_back} that {spec.devices.source} can run and that are not held "
            "out; add models or sizes"
        )
    kept_back = max(kept_back, 2)  # the least that a campaign file may have
    return spec.model_copy(
        update={
            "evaluation": spec.evaluation.model_copy(update={"source": kept_back}),
            "initial": spec.initial.model_copy(update={"source": len(possible) - kept_back}),
        }
    )


@dataclass(frozen=True, kw_only=True)
class ChoiceRequest:
    """A device's part of a round, to be chosen by acquisition; configurations by their ids."""

    device: str
    count: int
    candidates: Sequence[str]
    known: Sequence[str]
    """Configurations that training on this device learns from, measured or to be measured."""
    unsteady: Mapping[str, int] = field(default_factory=dict)
    """Candidates that failed as unstable, with their numbers of failed attempts."""
    capacity_mib: float | None = None
    """Memory of the device: measured, or else from its name or host."""
    card: str | None = None
    """Card of the device by all measurements, as in `TrainingLabel`."""
    seed: Sequence[int]


@dataclass(frozen=True)
class Choice:
    """A configuration to measure, and the reason."""

    configuration_id: str
    reason: Mapping[str, Any]


class Planner:
    """Plans the parts of a campaign's rounds from its pool."""

    def __init__(self, store: Store, campaign_id: str, spec: CampaignSpec) -> None:
        self._store, self._id, self._spec = store, campaign_id, spec
        self._pool: list[tuple[Configuration, bool]] = []

    @property
    def pool(self) -> list[tuple[Configuration, bool]]:
        """Configurations, and whether their architectures are held out; it never changes."""
        if not self._pool:
            self._pool = self._store.campaigns.pool(self._id)
        return self._pool

    def store_pool(self, configurations: Sequence[Configuration]) -> None:
        """Store the campaign's pool; configurations without a graph are left out.

        Raises:
            InputError: The pool is too small for the budget.
        """
        graphs = self._graphs(configurations)
        pool = [c for c in configurations if _pair_of(c) in graphs]
        held_out = check_budget(self._spec, pool, groups_of(pool, graphs))
        self._store.campaigns.set_pool(self._id, [(c, c.architecture in held_out) for c in pool])

    def _graphs(self, configurations: Iterable[Configuration]) -> dict[Pair, bytes]:
        """Return a graph for each architecture and input size, of any of its steps."""
        graphs = self._store.traces.graphs(steps_of(configurations))
        return {_pair(key): graph for key, graph in graphs.items()}

    def steps(self) -> list[TraceKey]:
        """Return the distinct steps of the pool."""
        return steps_of(c for c, _ in self.pool)

    def learner_pool(self) -> tuple[list[tuple[Configuration, bytes]], list[bytes | None]]:
        """Return the configurations (n) with their graphs, and their traced steps (n).

        Raises:
            CampaignError: A model of the pool has lost its graph.
        """
        configurations = [c for c, _ in self.pool]
        graphs = self._graphs(configurations)
        traces = self._store.traces.steps(steps_of(configurations))
        if without := [c for c in configurations if _pair_of(c) not in graphs]:
            raise CampaignError(
                f"{without[0].architecture} is in the pool, but can no longer be traced; install "
                f"the earlier libraries and continue with: trappm campaign resume {self._id}"
            )
        pool = [(c, graphs[_pair_of(c)]) for c in configurations]
        return pool, [traces.get(TraceKey.of(c)) for c in configurations]

    def draw(self, device: str, count: int) -> list[Assignment]:
        """Draw a device's part of the evaluation set uniformly from what it can run.

        Eager configurations are drawn, and come with their compiled ones as in `plan_chosen`.
        Configurations that surely do not fit into its memory are taken only if others run out.
        """
        candidates = self._eager(device, is_held_out=True)
        key = [self._spec.seed, 1, self._spec.devices.keys.index(device)]
        order = np.random.default_rng(key).permutation(len(candidates))
        count = self._all_or(count)
        drawn = [candidates[i] for i in order]
        capacity_mib = None if is_cpu_device(device) else self._capacity_mib(device)
        if capacity_mib is not None and rank_key(device).ranks == 1:
            fits, exceeds = list[Configuration](), list[Configuration]()
            first = first_steps(c for c, _ in self.pool)
            trace_of = cache(self._store.traces.get)
            for configuration in drawn:
                if len(fits) == count:
                    break
                step = first[_pair_of(configuration), configuration.phase]
                least_mib = _least_mib(configuration, step, trace_of(step))
                (exceeds if least_mib > capacity_mib else fits).append(configuration)
            drawn = fits + exceeds
        reason = {"strategy": "uniform draw"}
        return self._plan(device, Role.EVALUATE, [(c, reason) for c in drawn[:count]], count)

    def make_request(self, device: str, number: int, count: int) -> ChoiceRequest:
        """Return the request for a device's part of the initial or of an acquired round.

        Configurations that failed as unstable may be chosen again, others that failed may not.
        """
        trainable = dict.fromkeys(c.id for c in self._eager(device, is_held_out=False))
        assigned = {
            a.configuration.id: a.state
            for a in self._store.assignments.of_campaign(self._id, device=device)
            if a.configuration.id in trainable
        }
        unsteady = {
            a.configuration.id: a.failures
            for a, outcome in self._store.assignments.list_failed(self._id)
            if (a.device, outcome) == (device, Outcome.UNSTABLE) and a.configuration.id in trainable
        }
        candidates = [name for name in trainable if name not in assigned or name in unsteady]
        return ChoiceRequest(
            device=device,
            count=min(self._all_or(count), len(candidates)),
            candidates=candidates,
            known=sorted(
                name for name, state in assigned.items() if state is not AssignmentState.FAILED
            ),
            unsteady=unsteady,
            capacity_mib=self._capacity_mib(device),
            card=self.card(device),
            seed=(self._spec.seed, number, self._spec.devices.keys.index(device)),
        )

    def plan_chosen(self, device: str, choices: Sequence[Choice], count: int) -> list[Assignment]:
        """Return `count` assignments of what the learner chose, which are eager configurations.

        Each is followed by the same configuration compiled, if the pool has that.
        """
        by_id = {c.id: c for c, _ in self.pool}
        ranked = [(by_id[c.configuration_id], dict(c.reason)) for c in choices]
        return self._plan(device, Role.TRAIN, ranked, self._all_or(count))

    def _eager(self, device: str, *, is_held_out: bool) -> list[Configuration]:
        """Return what can be drawn or chosen for a device: compiled steps follow eager ones."""
        runs = possible_runs(device)
        return [
            c for c, held_out in self.pool
            if held_out == is_held_out and _is_eager(c) and _run(c) in runs
        ]  # fmt: skip

    def _all_or(self, count: int) -> int:
        """Return the size of a part of a round: all there is, or the number of the budget."""
        return len(self.pool) if self._spec.strategy == ALL else count

    def _plan(
        self,
        device: str,
        role: Role,
        ranked: Sequence[tuple[Configuration, dict[str, Any]]],
        count: int,
    ) -> list[Assignment]:
        """Return assignments of configurations with their reasons, the most wanted first."""
        runs, open_to_plan = possible_runs(device), {c for c, _ in self.pool}
        for known in self._store.assignments.of_campaign(self._id, device=device):
            if known.state is not AssignmentState.FAILED:
                open_to_plan.discard(known.configuration)
        pairs = [
            (one, reason)
            for c, reason in ranked
            for one in (c, replace(c, execution=Execution.COMPILE))
            if one in open_to_plan and _run(one) in runs
        ]
        return [
            Assignment(configuration=one, device=device, role=role, rank=rank, reason=reason)
            for rank, (one, reason) in enumerate(pairs[:count])
        ]

    def _capacity_mib(self, device: str) -> float | None:
        measured = self._store.measurements.device_memory_mib(device)
        return measured or device_capacity_mib(device)

    def card(self, device: str) -> str:
        """Return the name of the card behind a device's key."""
        return card_name(device, self._store.measurements.device_environments(device).values())


def _least_mib(configuration: Configuration, key: TraceKey, made: Trace | Refusal | None) -> float:
    """Return what the step's tensors need at least, from the plainest step of its model.

    In other precisions a tensor has half the bytes at least.
    """
    if not isinstance(made, Trace) or made.allocations is None:
        return 0.0
    memory = memory_of(made, configuration.batch_size, configuration.optimizer)
    has_types_of_trace = configuration.precision.types is key.settings.precision
    return memory.live_mib * (1.0 if has_types_of_trace else 0.5)


def _pair(key: TraceKey) -> Pair:
    return key.model, key.input_size or 0


def _pair_of(configuration: Configuration) -> Pair:
    return configuration.architecture, configuration.input_size


def _run(configuration: Configuration) -> tuple[Precision, Execution]:
    return configuration.precision, configuration.execution


def _is_eager(configuration: Configuration) -> bool:
    """Return whether heads learn from labels of a configuration."""
    return configuration.execution is Execution.EAGER
