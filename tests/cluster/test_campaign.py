"""The campaign loop, driven by a crew of its own: no Ray, no training, every fault on demand.

The crew's measurements are marked as simulated; the store and the loop are the real ones.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml

from cluster.campaign import Campaign, CampaignStopped
from cluster.crew import Choice, Finished, ProfiledGraph, Worker
from cluster.launch import check_spec, spec_of
from cluster.spec import CampaignSpec, parse_spec
from profiler.errors import CampaignError, InputError
from profiler.pool import build_pool
from profiler.records import (
    GraphTemplate,
    Measurement,
    Outcome,
    Provenance,
    StepSummary,
)
from store import Store

SPEC = {
    "name": "tiny",
    "seed": 7,
    "devices": {"source": "cpu-2t", "target": "cpu-1t"},
    "evaluation": {"source": 3, "target": 2, "architecture_share": 0.3},
    "initial": {"source": 4, "target": 2},
    "rounds": {"count": 2, "source": 2, "target": 1},
    "pool": {
        "groups": [
            {
                "architectures": ["resnet10t", "resnet14t", "resnet18", "vgg11", "convnext_atto"],
                "batch_sizes": [1, 2, 4],
                "input_sizes": [64],
            }
        ]
    },
}
BUDGET = {"cpu-2t": 3 + 4 + 2 * 2, "cpu-1t": 2 + 2 + 2 * 1}


def spec(**changes) -> CampaignSpec:
    return parse_spec(yaml.safe_dump(SPEC | changes), origin="test")


def template() -> bytes:
    sizes = {n: np.ones((2, 6), np.int64) for n in ("input_shapes", "output_shapes")}
    sizes |= {n: np.ones(2, np.int64) for n in ("macs", "memory_bytes")}
    return GraphTemplate(
        operators=("Conv", "Relu"),
        edges=np.array([[0, 1]]),
        constant=sizes,
        slope=sizes,
        parameters=np.ones(2, np.int64),
    ).to_bytes()


class FakeCrew:
    """Two workers on one host; `faults` maps the n-th start to what then happens, and `poison`
    happens whenever the first configuration is measured."""

    def __init__(self, faults=None, stop_after=None, poison=None):
        self.faults = dict(faults or {})
        self.poison = poison
        self.starts: list[tuple[str, str]] = []
        self.most_at_once = 0
        self.stop_after = stop_after
        self.campaign = None
        self._running = []

    def profile(self, pairs):
        for architecture, size in pairs:
            if architecture == "vgg11":
                yield ProfiledGraph(architecture, size, None, "too small an input")
            else:
                yield ProfiledGraph(architecture, size, template(), None)

    def workers(self):
        return [Worker(f"w-{d}", d, "host", "stack") for d in ("cpu-2t", "cpu-1t")]

    def awaited(self):
        return []

    def idle(self):
        return [] if self._running else self.workers()

    def running(self):
        return list(self._running)

    def start(self, worker, assignment, protocol):
        self.starts.append((worker.device, assignment.configuration.id))
        self._running.append((worker, assignment))
        self.most_at_once = max(self.most_at_once, len(self._running))
        self._protocol = protocol
        if self.stop_after is not None and len(self.starts) >= self.stop_after:
            self.campaign.stop()

    def wait(self, timeout_s):
        finished = []
        for worker, assignment in self._running:
            fault = self.faults.pop(len(self.starts), None)
            if self.poison and self.starts[-1] == self.starts[0]:
                fault = self.poison
            if fault == "lost":
                finished.append(Finished(worker, assignment, None, "the profiler died"))
                continue
            finished.append(Finished(worker, assignment, self._measure(worker, assignment, fault)))
        self._running = []
        return finished

    def _measure(self, worker, assignment, fault):
        outcome = Outcome(fault or "ok")
        configuration = assignment.configuration
        cost = 10.0 * configuration.batch_size
        ok = outcome is Outcome.OK
        return Measurement(
            configuration=configuration,
            device=worker.device,
            outcome=outcome,
            protocol=self._protocol,
            started_at="2026-01-01T00:00:00+00:00",
            duration_s=1.0,
            attempt_key=f"{assignment.id}-{assignment.attempts}",
            provenance=Provenance.SIMULATED,
            step_samples_ms=(cost,) * 8 if ok else (),
            step=StepSummary(median_ms=cost, mean_ms=cost, iqr_ms=0, p95_ms=cost) if ok else None,
            memory_mib=100.0 if ok else None,
            missing={} if ok else {"step_time_ms": "no result", "memory_mib": "no result"},
            message=None if ok else f"made to end as {outcome}",
            failed_in=None if ok else "measure",
            environment={"stack_fingerprint": "stack"},
        )


class FakeLearner:
    """Picks the first candidates; remembers what it was given."""

    def __init__(self):
        self.fits: list[Counter] = []
        self.seen_roles = set()

    def set_pool(self, pool, on_progress):
        self.pool = {c.id: c for c, _ in pool}
        on_progress(1, 1)

    def fit(self, labels, on_progress):
        self.fits.append(Counter((x.device, x.role) for x in labels))
        self.train = {
            self.pool[x.configuration_id].architecture for x in labels if x.role == "train"
        }
        self.evaluate = {
            self.pool[x.configuration_id].architecture for x in labels if x.role == "evaluate"
        }
        devices = {x.device: {} for x in labels if x.role == "train"}
        return {"devices": devices, "labels": {}, "evaluation": []}

    def choose(self, device, count, *, candidates, labelled, seed):
        assert not set(candidates) & set(labelled)
        return [Choice(c, {"rank": i}) for i, c in enumerate(sorted(candidates)[:count])]

    def publish(self, registry, fields):
        return {"id": "snap1", "folder": "snap1", "manifest": {"heads": {}, **fields}}


@pytest.fixture
def store(tmp_path):
    with Store.open(f"sqlite:///{tmp_path / 'labels.db'}") as opened:
        yield opened


def campaign(store, crew, learner=None, campaign_id=None, **changes):
    if campaign_id is None:
        record = store.create_campaign("tiny", spec(**changes).model_dump(mode="json"), 7)
        campaign_id = record.id
    crew.campaign = Campaign(
        store=store,
        campaign_id=campaign_id,
        spec=spec_of(store.campaign(campaign_id)),
        crew=crew,
        learner=learner or FakeLearner(),
        snapshots=Path("unused"),
    )
    return crew.campaign


def labels_by_device(store, campaign_id):
    return Counter(label.device for label in store.campaign_labels(campaign_id))


def test_a_campaign_spends_its_budget_once_and_publishes(store):
    crew, learner = FakeCrew(), FakeLearner()
    run = campaign(store, crew, learner)
    assert run.run() == "snap1"
    assert labels_by_device(store, run.id) == BUDGET
    assert len(crew.starts) == len(set(crew.starts)) == sum(BUDGET.values())
    assert crew.most_at_once == 1
    assert store.campaign(run.id).state == "finished"
    assert store.snapshot("latest").id == "snap1"
    assert [r.purpose for r in store.rounds(run.id)] == [
        "evaluation", "initial", "acquired", "acquired",
    ]  # fmt: skip
    assert len(learner.fits) == 3


def test_architectures_of_the_evaluation_set_are_never_trained_on(store):
    learner = FakeLearner()
    campaign(store, FakeCrew(), learner).run()
    assert learner.train
    assert learner.evaluate
    assert not learner.train & learner.evaluate


def test_an_architecture_without_a_graph_is_refused_with_its_reason_and_not_measured(store):
    crew = FakeCrew()
    run = campaign(store, crew)
    run.run()
    assert {c.architecture for c, _ in store.campaign_pool(run.id)}.isdisjoint({"vgg11"})
    assert [(r.architecture, r.reason) for r in store.refusals()] == [
        ("vgg11", "too small an input")
    ]


def test_a_campaign_chooses_from_a_pool_that_was_built_before(store):
    store.save_pool("built", {}, build_pool(spec().pool))
    crew = FakeCrew()
    run = campaign(store, crew, pool="built")
    assert run.spec.pool == "built"
    run.run()
    assert labels_by_device(store, run.id) == BUDGET
    chosen_from = {c for c, _ in store.campaign_pool(run.id)}
    assert chosen_from == {c for c in store.pool("built") if c.architecture != "vgg11"}
    store.save_pool("built", {}, [])  # what a campaign has taken it keeps
    assert {c for c, _ in store.campaign_pool(run.id)} == chosen_from


def test_a_pool_that_was_not_built_or_is_too_small_is_told_before_anything_starts(store):
    with pytest.raises(InputError, match="trappm pool build"):
        check_spec(store, spec(pool="bilt"), "auto")
    store.save_pool("built", {}, build_pool(spec().pool))
    with pytest.raises(InputError, match="no pool 'bilt'; did you mean 'built'"):
        check_spec(store, spec(pool="bilt"), "auto")
    check_spec(store, spec(pool="built"), "auto")
    for architecture in ("resnet10t", "resnet14t", "resnet18"):
        store.save_graph(architecture, 64, None, "too odd")
    with pytest.raises(InputError, match="budget for cpu-2t cannot be met"):
        check_spec(store, spec(pool="built"), "auto")


@pytest.mark.parametrize("stop_after", [1, 3, 6, 9, 13])
def test_a_stopped_campaign_resumes_without_losing_or_repeating_a_label(store, stop_after):
    crew = FakeCrew(stop_after=stop_after)
    run = campaign(store, crew)
    with pytest.raises(CampaignStopped):
        run.run()
    assert store.campaign(run.id).state == "paused"
    recorded = {(x.device, x.configuration.id) for x in store.campaign_labels(run.id)}
    again = FakeCrew()
    campaign(store, again, campaign_id=run.id).run()
    assert labels_by_device(store, run.id) == BUDGET
    assert not recorded & set(again.starts)


@pytest.mark.parametrize("fault", ["lost", "unstable", "error"])
def test_a_passing_fault_is_tried_again(store, fault):
    crew = FakeCrew(faults={2: fault, 7: fault})
    run = campaign(store, crew)
    run.run()
    assert labels_by_device(store, run.id) == BUDGET
    assert len(crew.starts) == sum(BUDGET.values()) + 2


@pytest.mark.parametrize("fault", ["lost", "unstable", "error"])
def test_a_configuration_that_always_fails_is_given_up_after_bounded_attempts(store, fault):
    crew = FakeCrew(poison=fault)
    run = campaign(store, crew)
    run.run()
    assert labels_by_device(store, run.id).total() == sum(BUDGET.values()) - 1
    assert Counter(a.state for a in store.assignments(run.id))["failed"] == 1


def test_an_initial_draw_without_labels_fails_the_campaign_and_resume_measures_it_again(store):
    crew = FakeCrew(faults=dict.fromkeys(range(1, 1000), "unstable"))
    run = campaign(store, crew)
    with pytest.raises(CampaignError, match=r"too few labels on cpu-2t.*unstable"):
        run.run()
    assert labels_by_device(store, run.id).total() == 0
    campaign(store, FakeCrew(), campaign_id=run.id).run()
    assert labels_by_device(store, run.id)["cpu-2t"] >= BUDGET["cpu-2t"] - 3


def test_what_failed_waits_until_the_rest_of_its_round_is_measured(store):
    crew = FakeCrew(faults={1: "unstable"})
    campaign(store, crew).run()
    again = [i for i, start in enumerate(crew.starts) if start == crew.starts[0]]
    assert again == [0, SPEC["evaluation"]["source"]]


def test_out_of_memory_is_kept_as_an_outcome_and_not_tried_again(store):
    crew = FakeCrew(faults={2: "oom"})
    run = campaign(store, crew)
    run.run()
    assert len(crew.starts) == sum(BUDGET.values())
    outcomes = store.outcome_counts(run.id)
    assert sum(c.get("oom", 0) for c in outcomes.values()) == 1


def test_a_budget_that_the_pool_cannot_meet_is_told_before_anything_is_measured(store):
    crew = FakeCrew()
    run = campaign(store, crew)
    run.spec = run.spec.model_copy(
        update={"initial": run.spec.initial.model_copy(update={"source": 500})}
    )
    with pytest.raises(InputError, match="budget for cpu-2t cannot be met"):
        run.run()
    assert crew.starts == []
    assert store.campaign(run.id).state == "failed"


def test_a_failure_of_the_learner_fails_the_campaign_and_resume_completes_it(store):
    class Broken(FakeLearner):
        def fit(self, labels, on_progress):
            raise CampaignError("the learner died")

    crew = FakeCrew()
    run = campaign(store, crew, Broken())
    with pytest.raises(CampaignError, match="learner died"):
        run.run()
    assert store.campaign(run.id).state == "failed"
    measured = len(crew.starts)
    again = FakeCrew()
    campaign(store, again, campaign_id=run.id).run()
    assert measured + len(again.starts) == sum(BUDGET.values())


def test_the_same_seed_draws_the_same_configurations(tmp_path):
    drawn = []
    for name in ("one", "two"):
        with Store.open(f"sqlite:///{tmp_path / name}.db") as store:
            run = campaign(store, crew := FakeCrew())
            run.run()
            drawn.append(crew.starts)
    assert drawn[0] == drawn[1]
