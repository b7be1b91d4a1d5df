"""What a campaign may choose from, and what it draws or has chosen from that for a round."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from trappm.cluster.campaign.candidates import check_budget, pool_of, twins_of, without_refused
from trappm.cluster.campaign.news import News
from trappm.cluster.profiles.step_profiles import StepCache, StepKey
from trappm.cluster.spec import CampaignSpec
from trappm.cluster.workers.interfaces import Choice, ChoiceRequest, Workers
from trappm.learner.physics.device_specs import has_kernels, known_spec
from trappm.profiler.devices.capacity import expected_memory_mib
from trappm.profiler.devices.catalogue import card_name
from trappm.profiler.records import Configuration, Outcome
from trappm.store import Assignment, AssignmentState, PlannedAssignment, Store
from trappm.store.records import Purpose, Role

PURPOSES = tuple(Purpose)

Made = TypeVar("Made")


class Planner:
    """Makes the pool of a campaign, and the parts of its rounds from it."""

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

    def make_pool(self, workers: Workers, news: News) -> None:
        """Stores the pool and the static profiles that are missing, unless that was done before.

        Raises:
            InputError: the pool is too small for the budget.
        """
        if self.pool:
            return
        configurations = pool_of(self._spec, self._store)
        news.tell("pool", news=f"pool: {len(configurations)} configurations")
        self._profile(configurations, workers, news)
        pool = without_refused(configurations, self._store)
        held_out = check_budget(self._spec, pool, twins_of(pool, self._store))
        self._store.campaigns.set_pool(self._id, [(c, c.architecture in held_out) for c in pool])

    def _profile(
        self, configurations: Sequence[Configuration], workers: Workers, news: News
    ) -> None:
        pairs = sorted({(c.architecture, c.input_size) for c in configurations})
        missing = self._store.workloads.pairs_to_profile(pairs)
        news.tell("graphs", done=len(pairs) - len(missing), total=len(pairs))
        for graph in _followed(workers.profile(missing), len(missing), news):
            graph.save(self._store)
            if graph.refusal:
                news.tell(news=f"no graph of {graph.architecture}: {graph.refusal}")

    def make_steps(self, kept: StepCache, workers: Workers, news: News) -> dict[StepKey, bytes]:
        """Steps of the pool in settings of their own, traced where they are missing.

        None without a device that is known: nothing says how fast another runs its kernels.
        """
        for device in self._spec.devices.keys:
            if known_spec(self._card(device)) is None:
                news.tell(
                    news=f"{device} is not in profiler/devices/catalogue.csv: how long its steps "
                    "take is learned from labels alone, without its data sheet"
                )
        keys = self._step_keys()
        profiles = self.known_steps(kept)  # which removes what is damaged
        missing = kept.missing(keys)
        if missing:
            news.tell("steps", done=len(keys) - len(missing), total=len(keys))
        for traced in _followed(workers.trace(missing), len(missing), news):
            if traced.is_final:
                kept.put(traced)
            if traced.profile is not None:
                profiles[traced.key] = traced.profile
            if traced.refusal:
                news.tell(news=f"no step of {traced.key.architecture}: {traced.refusal}")
        return profiles

    def known_steps(self, kept: StepCache) -> dict[StepKey, bytes]:
        """Those that were traced before."""
        profiles = {key: kept.read(key) for key in self._step_keys()}
        return {key: profile for key, profile in profiles.items() if profile is not None}

    def _step_keys(self) -> list[StepKey]:
        if not any(has_kernels(self._card(device)) for device in self._spec.devices.keys):
            return []
        keys = {StepKey.of(configuration) for configuration, _ in self.pool}
        plain = {key: (key.architecture, key.input_size) for key in keys if key.is_plain}
        stored = self._store.workloads.step_profiles(plain.values())
        return sorted(key for key in keys if plain.get(key) not in stored)

    def draw(self, device: str, count: int) -> list[PlannedAssignment]:
        """A uniform draw for a device's part of the evaluation set."""
        candidates = [c for c, is_held_out in self.pool if is_held_out]
        key = [self._spec.seed, 1, self._spec.devices.keys.index(device)]
        order = np.random.default_rng(key).permutation(len(candidates))[:count]
        return [
            PlannedAssignment(
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
            card=self._card(device),
            seed=(self._spec.seed, number, self._spec.devices.keys.index(device)),
        )

    def chosen(self, device: str, choices: Sequence[Choice]) -> list[PlannedAssignment]:
        """What the learner answered, to be written down."""
        by_id = {c.id: c for c, _ in self.pool}
        return [
            PlannedAssignment(
                configuration=by_id[choice.configuration_id],
                device=device,
                role=Role.TRAIN,
                rank=rank,
                reason=dict(choice.reason),
            )
            for rank, choice in enumerate(choices)
        ]

    def _card(self, device: str) -> str:
        return card_name(device, self._store.measurements.device_environments(device).values())

    def _assigned(self, device: str) -> dict[str, Assignment]:
        return {
            a.configuration.id: a
            for a in self._store.assignments.of_campaign(self._id, device=device)
        }


def _followed(made: Iterable[Made], count: int, news: News) -> Iterator[Made]:
    """Pass profiles on as they are made, and show their number and the time to go."""
    begin = time.monotonic()
    for number, one in enumerate(made, 1):
        news.check_stop()
        yield one
        to_go_s = (time.monotonic() - begin) / number * (count - number)
        news.tell(done=news.progress.done + 1, eta_s=to_go_s if number < count else None)


def _taught(assigned: Iterable[Assignment]) -> list[str]:
    """What training learns from, now or later: all but what is held out or was given up."""
    return sorted(
        a.configuration.id
        for a in assigned
        if a.role == Role.TRAIN and a.state is not AssignmentState.FAILED
    )
