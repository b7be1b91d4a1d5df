"""The pool that a campaign chooses from, and what it draws or has chosen from it for a round."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from trappm.cluster.interfaces import Choice, ChoiceRequest
from trappm.cluster.profiles.step_profiles import StepCache, StepKey
from trappm.cluster.spec import CampaignSpec
from trappm.learner.physics.device_specs import has_kernels
from trappm.learner.stats.errors import split_architectures
from trappm.learner.stats.folds import content_groups
from trappm.learner.workload import Workload
from trappm.profiler.devices.capacity import expected_memory_mib
from trappm.profiler.devices.catalogue import card_name
from trappm.profiler.errors import InputError
from trappm.profiler.models.pool import build_pool
from trappm.profiler.records import Configuration, Graph, GraphTemplate, Outcome
from trappm.profiler.transformers.names import model_of
from trappm.store import Assignment, AssignmentState, Store
from trappm.store.records import Purpose, Role

PURPOSES = tuple(Purpose)


def pool_of(spec: CampaignSpec, store: Store) -> list[Configuration]:
    """The configurations that a campaign file describes, or that its named pool has now.

    Raises:
        UnknownArchitectureError: a name or glob in the file matches no timm architecture.
        InputError: there is no pool of this name.
    """
    return store.pools.get(spec.pool) if isinstance(spec.pool, str) else build_pool(spec.pool)


def without_refused(pool: Sequence[Configuration], store: Store) -> list[Configuration]:
    """Those of which a graph can be made, as far as it has been tried."""
    refused = {(r.architecture, r.input_size) for r in store.workloads.refusals()}
    return [c for c in pool if (c.architecture, c.input_size) not in refused]


def check_stop(spec: CampaignSpec) -> None:
    """Raises InputError for a budget of labels that ends before anything can be learned from."""
    budget = None if spec.stop is None else spec.stop.labels
    first = sum(sum(spec.shares(device)[:2]) for device in spec.devices.keys)
    if budget is not None and budget < first:
        raise InputError(
            f"the stop rule labels is {budget}, and evaluation and initial alone ask for {first}; "
            "raise it or lower them"
        )


def twins_of(pool: Sequence[Configuration], store: Store) -> list[str]:
    """With whom each configuration is held out: names of the same layers are one, once the store
    has their graphs."""
    templates = store.workloads.graph_templates([(c.architecture, c.input_size) for c in pool])
    workload_of = {
        architecture: Workload(graph=GraphTemplate.from_bytes(data).at(1))
        for (architecture, _), data in templates.items()
    }
    unknown = Workload(graph=Graph.empty(1))
    names = [c.architecture for c in pool]
    return content_groups(names, [workload_of.get(name, unknown) for name in names])


def check_budget(
    spec: CampaignSpec, pool: Sequence[Configuration], twins: Sequence[str] | None = None
) -> set[str]:
    """The architectures to hold out of this pool.

    Args:
        spec: the campaign file.
        pool: (n).
        twins: with whom each configuration is held out (n); by default its model, however trained.

    Raises:
        InputError: the pool is too small for the budget.
    """
    generator = np.random.default_rng([spec.seed, 0])
    groups = [model_of(c.architecture) for c in pool] if twins is None else twins
    held_out = split_architectures(pool, spec.evaluation.architecture_share, generator, groups)
    kept_back = sum(c.architecture in held_out for c in pool)
    for device in spec.devices.keys:
        wanted, *others = spec.shares(device)
        training = sum(others)
        if wanted > kept_back or training > len(pool) - kept_back:
            raise InputError(
                f"the budget for {device} cannot be met: it asks for {wanted} evaluation and "
                f"{training} training configurations, and the pool has {kept_back} and "
                f"{len(pool) - kept_back}; lower the budget or widen the pool"
            )
    return held_out


class Planner:
    """Plans the parts of a campaign's rounds from its pool."""

    def __init__(self, store: Store, campaign_id: str, spec: CampaignSpec) -> None:
        self._store = store
        self._id = campaign_id
        self._spec = spec
        self._pool: list[tuple[Configuration, bool]] = []

    @property
    def pool(self) -> list[tuple[Configuration, bool]]:
        """Each configuration, and whether its architecture is held out; it never changes."""
        if not self._pool:
            self._pool = self._store.campaigns.pool(self._id)
        return self._pool

    def known_steps(self, kept: StepCache) -> dict[StepKey, bytes]:
        """Those that were traced before."""
        profiles = {key: kept.read(key) for key in self.step_keys()}
        return {key: profile for key, profile in profiles.items() if profile is not None}

    def step_keys(self) -> list[StepKey]:
        """Return the steps that the pool's configurations need and the store does not have."""
        if not any(has_kernels(self.card(device)) for device in self._spec.devices.keys):
            return []
        keys = {StepKey.of(configuration) for configuration, _ in self.pool}
        plain = {key: (key.architecture, key.input_size) for key in keys if key.is_plain}
        stored = self._store.workloads.step_profiles(plain.values())
        return sorted(key for key in keys if plain.get(key) not in stored)

    def draw(self, device: str, count: int) -> list[Assignment]:
        """A uniform draw for a device's part of the evaluation set."""
        candidates = [c for c, is_held_out in self.pool if is_held_out]
        key = [self._spec.seed, 1, self._spec.devices.keys.index(device)]
        order = np.random.default_rng(key).permutation(len(candidates))[:count]
        return [
            Assignment(
                configuration=candidates[index],
                device=device,
                role=Role.EVALUATE,
                rank=rank,
                reason={"strategy": "uniform draw"},
            )
            for rank, index in enumerate(order)
        ]

    def request(self, device: str, number: int, count: int) -> ChoiceRequest:
        """What to ask the learner for a device's part of the initial or of an acquired round.

        What was given up as unstable may be chosen again; what died or failed otherwise may not.
        """
        assigned = self._assigned(device)
        unsteady = self._store.assignments.given_up(self._id, device, Outcome.UNSTABLE)
        candidates = [
            c.id
            for c, is_held_out in self.pool
            if not is_held_out and (c.id not in assigned or c.id in unsteady)
        ]
        return ChoiceRequest(
            device=device,
            count=min(count, len(candidates)),
            candidates=candidates,
            known=_taught(assigned.values()),
            unsteady=unsteady,
            capacity_mib=self._store.measurements.device_memory_mib(device)
            or expected_memory_mib(device),
            card=self.card(device),
            seed=(self._spec.seed, number, self._spec.devices.keys.index(device)),
        )

    def chosen(self, device: str, choices: Sequence[Choice]) -> list[Assignment]:
        """What the learner answered, to be written down."""
        by_id = {c.id: c for c, _ in self.pool}
        return [
            Assignment(
                configuration=by_id[choice.configuration_id],
                device=device,
                role=Role.TRAIN,
                rank=rank,
                reason=dict(choice.reason),
            )
            for rank, choice in enumerate(choices)
        ]

    def card(self, device: str) -> str:
        """Return the name of the card behind a device's key."""
        return card_name(device, self._store.measurements.device_environments(device).values())

    def _assigned(self, device: str) -> dict[str, Assignment]:
        return {
            a.configuration.id: a
            for a in self._store.assignments.of_campaign(self._id, device=device)
        }


def _taught(assigned: Iterable[Assignment]) -> list[str]:
    """What training learns from, now or later: all but what is held out or was given up."""
    return sorted(
        a.configuration.id
        for a in assigned
        if a.role == Role.TRAIN and a.state is not AssignmentState.FAILED
    )
