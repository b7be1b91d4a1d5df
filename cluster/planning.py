"""What a campaign may choose from, and what it draws or has chosen from that for a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cluster.budget import check_budget, pool_of, without_refused
from cluster.crew import Choice, Crew
from cluster.spec import CampaignSpec
from cluster.telling import Teller
from profiler.records import Configuration
from store import PlannedAssignment, Store

PURPOSES = ("evaluation", "initial", "acquired")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What acquisition is asked for a device's part of a round."""

    device: str
    round_number: int
    count: int
    candidates: Mapping[str, Configuration]
    """Those that may be chosen, by id."""
    labelled: Sequence[str]
    """Ids of the training configurations that were assigned before, measured or not."""
    seed: Sequence[int]


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
            self._pool = self._store.campaign_pool(self._id)
        return self._pool

    def make_pool(self, crew: Crew, teller: Teller) -> None:
        """Stores the pool and the static profiles that are missing, unless that was done before.

        Raises:
            InputError: the pool is too small for the budget.
        """
        if self.pool:
            return
        configurations = pool_of(self._spec, self._store)
        teller.tell("pool", news=f"pool: {len(configurations)} configurations")
        self._profile(configurations, crew, teller)
        pool = without_refused(configurations, self._store)
        held_out = check_budget(self._spec, pool)
        self._store.set_campaign_pool(self._id, [(c, c.architecture in held_out) for c in pool])

    def _profile(self, configurations: Sequence[Configuration], crew: Crew, teller: Teller) -> None:
        pairs = sorted({(c.architecture, c.input_size) for c in configurations})
        missing = self._store.pairs_to_profile(pairs)
        teller.tell("graphs", done=len(pairs) - len(missing), total=len(pairs))
        for graph in crew.profile(missing):
            teller.check_stop()
            graph.save(self._store)
            refusal = graph.refusal and f"no graph of {graph.architecture}: {graph.refusal}"
            teller.tell(done=teller.progress.done + 1, news=refusal)

    def draw(self, device: str, number: int, count: int) -> list[PlannedAssignment]:
        """A uniform draw for a device's part of the evaluation set or of the initial round."""
        candidates = self._candidates(device, held_out=number == 0)
        key = [self._spec.seed, number + 1, self._spec.devices.keys.index(device)]
        order = np.random.default_rng(key).permutation(len(candidates))[:count]
        role = "evaluate" if number == 0 else "train"
        return [
            PlannedAssignment(
                configuration=candidates[index],
                device=device,
                role=role,
                rank=rank,
                reason={"strategy": "uniform draw"},
            )
            for rank, index in enumerate(order)
        ]

    def request(self, device: str, number: int, count: int) -> Request:
        """What to ask the learner for a device's part of an acquired round."""
        candidates = self._candidates(device, held_out=False)
        assigned = self._store.assignments(self._id, device=device)
        return Request(
            device=device,
            round_number=number,
            count=min(count, len(candidates)),
            candidates={c.id: c for c in candidates},
            labelled=sorted(a.configuration.id for a in assigned if a.role == "train"),
            seed=(self._spec.seed, number, self._spec.devices.keys.index(device)),
        )

    @staticmethod
    def chosen(request: Request, choices: Sequence[Choice]) -> list[PlannedAssignment]:
        """What the learner answered, to be written down."""
        return [
            PlannedAssignment(
                configuration=request.candidates[choice.configuration_id],
                device=request.device,
                role="train",
                rank=rank,
                reason=dict(choice.reason),
            )
            for rank, choice in enumerate(choices)
        ]

    def _candidates(self, device: str, *, held_out: bool) -> list[Configuration]:
        taken = {a.configuration.id for a in self._store.assignments(self._id, device=device)}
        return [c for c, is_held_out in self.pool if is_held_out == held_out and c.id not in taken]
