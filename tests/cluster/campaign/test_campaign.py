"""The campaign loop, driven by made-up workers: no Ray, no training, every fault on demand."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from fakes import (
    BUDGET,
    ONE_DEVICE,
    SPEC,
    FakeLearner,
    FakeWorkers,
    UnfinishedError,
    campaign,
    labels_by_device,
    ran,
    spec,
    without_step,
)

import trappm.cluster.campaign.campaign
import trappm.cluster.launch
from trappm.cluster.campaign.campaign import CampaignStopped
from trappm.cluster.campaign.planner import with_whole_pool
from trappm.cluster.campaign.workers import Worker
from trappm.cluster.launch import check_spec, order_retry, order_stop, start_or_continue, to_resume
from trappm.cluster.spec import parse_spec
from trappm.cluster.trace_tasks import Traced
from trappm.profiler.errors import CampaignError, InputError
from trappm.profiler.host.environment import stack_fingerprint
from trappm.profiler.models.pool import build_pool
from trappm.profiler.traced_step import Refusal, TraceKey
from trappm.store import CampaignState, Store


def test_a_campaign_measures_its_budget_once_and_publishes(store, new_store):
    workers, learner = FakeWorkers(), FakeLearner()
    run = campaign(store, workers, learner)
    assert run.run() == "snap1"
    assert labels_by_device(store, run.id) == BUDGET
    assert len(workers.starts) == len(set(workers.starts)) == sum(BUDGET.values())
    assert workers.most_at_once == 1
    record = store.campaigns.get(run.id)
    assert (record.state, record.snapshot) == ("finished", "snap1")
    purposes = [r.purpose for r in store.rounds.all(run.id)]
    assert purposes == ["evaluation", "initial", "acquired", "acquired"]
    assert len(learner.fits) == 3
    assert learner.train
    assert learner.evaluate
    assert not learner.train & learner.evaluate
    assert {c.architecture for c, _ in store.campaigns.pool(run.id)}.isdisjoint({"vgg11"})
    assert store.traces.get(TraceKey("vgg11", 64)) == Refusal("too small an input")
    with Store.open(new_store()) as another:
        ran(another, again := FakeWorkers())
    assert again.starts == workers.starts  # by the same seed


@pytest.mark.parametrize("seed", [1, 3])
def test_architectures_with_the_same_layers_are_held_out_together(store, seed):
    names = ["resnet10t", "resnet14t", "resnet18", "convnext_atto"]
    group = {"architectures": names, "batch_sizes": [1, 2, 4], "input_sizes": [64]}
    run = ran(
        store, FakeWorkers(duplicates={"resnet14t": "resnet10t"}), seed=seed,
        evaluation={"source": 3, "target": 2, "architecture_share": 0.5},
        rounds={"count": 1, "source": 1, "target": 1}, pool={"groups": [group]},
    )  # fmt: skip
    held_out = {c.architecture for c, is_out in store.campaigns.pool(run.id) if is_out}
    assert held_out
    assert ("resnet10t" in held_out) == ("resnet14t" in held_out)


def test_own_modules_are_measured_without_importing_them_here(store, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "shop").mkdir()
    for name in ("__init__", "net"):
        (tmp_path / "shop" / f"{name}.py").write_text("raise SystemExit('imported')")

    def trace_of(key):
        if "broken" in key.model:
            return Traced(key, Refusal("the import of shop.net failed"), is_final=False)
        return without_step(key)

    names = [f"shop.net:{name}" for name in ("one", "two", "three", "four", "broken")]
    group = {"architectures": names, "batch_sizes": [1, 2, 4], "input_sizes": [64]}
    workers = FakeWorkers(faults={2: "error"}, trace_of=trace_of)
    run = ran(store, workers, **ONE_DEVICE, pool={"groups": [group]})
    measured = {label.configuration.architecture for label in store.labels.of_campaign(run.id)}
    assert labels_by_device(store, run.id) == {"cpu-2t": BUDGET["cpu-2t"]}
    assert {name.partition("@")[0] for name in measured} == set(names[:4])
    assert all("@0+" in name for name in measured)  # the version of a package without one
    assert any("shop.net:broken" in line and "import" in line for line in workers.lines)
    assert not {"shop", "shop.net"} & set(sys.modules)


@pytest.mark.parametrize(("cluster", "most"), [("10.0.0.1:6379", 2), ("10.0.0.2:6379", 16)])
def test_campaigns_share_the_gpus_of_their_own_cluster_only(store, cluster, most):
    class Asked(FakeWorkers):
        at_most = math.inf

        def room(self, device):
            return 4

        def want(self, wanted, at_most, set_aside=()):
            self.at_most = min(self.at_most, at_most["cpu-2t"])

    mine, address = Asked(), "10.0.0.1:6379"
    begin_mine = (1, lambda: ran(store, mine, cluster=address))
    rival = campaign(store, FakeWorkers(at=begin_mine), cluster=cluster)
    rival.run()
    assert mine.at_most == most


def test_a_campaign_chooses_from_a_pool_that_was_built_before(store):
    store.pools.save("built", build_pool(spec().pool))
    workers = FakeWorkers()
    run = campaign(store, workers, pool="built")
    assert run.spec.pool == "built"
    run.run()
    assert labels_by_device(store, run.id) == BUDGET
    chosen_from = {c for c, _ in store.campaigns.pool(run.id)}
    assert chosen_from == {c for c in store.pools.get("built") if c.architecture != "vgg11"}
    store.pools.save("built", [])  # what a campaign has taken it keeps
    assert {c for c, _ in store.campaigns.pool(run.id)} == chosen_from


def test_a_missing_or_too_small_pool_is_refused_before_the_campaign_starts(store):
    with pytest.raises(InputError, match="trappm pool build"):
        check_spec(store, spec(pool="bilt"), "auto")
    store.pools.save("built", build_pool(spec().pool))
    check_spec(store, spec(pool="built"), "auto")
    for architecture in ("resnet10t", "resnet14t", "resnet18"):
        store.traces.put(TraceKey(architecture, 64), Refusal("too odd"))
    with pytest.raises(InputError, match="budget for cpu-2t cannot be met"):
        check_spec(store, spec(pool="built"), "auto")


def test_a_misspelt_device_of_a_cluster_is_reported_before_its_budget(store, monkeypatch):
    monkeypatch.setattr(trappm.cluster.launch, "list_gpus", lambda address: {"h1000", "gb200"})

    def launched_on(device):
        too_much = {"source": 9_999}
        check_spec(
            store, spec(**ONE_DEVICE | {"initial": too_much, "devices": {"source": device}}), "auto"
        )

    with pytest.raises(InputError, match="no device 'v1000'; did you mean 'v100'"):
        launched_on("v1000")
    for device in ("v100", "h1000", "tpu-v9"):  # ours, a node's, a kind that nobody knows
        with pytest.raises(InputError, match=f"budget for {device} cannot be met"):
            launched_on(device)


def test_a_campaign_whose_deadline_has_passed_is_not_created(store):
    over = spec(stop={"ends_at": "2020-01-01T00:00+00:00"})
    with pytest.raises(InputError, match="must be in the future"):
        start_or_continue(store, over)
    assert store.campaigns.all() == []
    begun = store.campaigns.create(over.name, over.model_dump(mode="json"), over.seed)
    assert start_or_continue(store, over)[0].id == begun.id  # it continues, and ends by its rule


def test_a_label_budget_below_the_first_training_set_is_refused(store):
    first = sum(SPEC[part][device] for part in ("evaluation", "initial")
                for device in ("source", "target"))  # fmt: skip
    with pytest.raises(InputError, match=f"alone ask for {first}"):
        check_spec(store, spec(stop={"labels": first - 1}), "auto")
    check_spec(store, spec(stop={"labels": first}), "auto")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("lost", "its worker was lost"),
        ("error", "error"),
        ("unsupported", None),
    ],
)
def test_a_configuration_that_always_fails_is_quarantined_and_can_be_retried(store, fault, reason):
    workers = FakeWorkers(poison=fault)
    run = ran(store, workers)
    assert labels_by_device(store, run.id).total() == sum(BUDGET.values()) - 1
    if reason is not None:
        attempts = 10 if fault == "lost" else 3
        assert Counter(a.state for a in store.assignments.of_campaign(run.id))["failed"] == 1
        (event,) = store.campaigns.events(run.id, kind="abandoned")
        assert f"no label after {attempts} attempts ({reason})" in event.message["message"]
        assert event.message["message"] in workers.lines
    assert order_retry(store, run.id, ["timeout"])[1] == 0
    assert store.campaigns.get(run.id).state == "finished"
    retried, count = order_retry(store, run.id, [fault])
    assert (retried.state, count) == ("paused", 1)
    again = FakeWorkers()
    campaign(store, again, FakeLearner("snap2"), campaign_id=run.id).run()
    assert len(again.starts) == 1
    assert labels_by_device(store, run.id) == BUDGET
    assert all(r.is_closed for r in store.rounds.all(run.id))


def test_an_initial_round_without_labels_fails_the_campaign_until_it_is_resumed(store):
    workers = FakeWorkers(faults=dict.fromkeys(range(1, 1000), "unstable"))
    run = campaign(store, workers)
    with pytest.raises(
        CampaignError, match=r"too few labels on cpu-2t.*resume \w+ --retry-failed --outcome uns"
    ):
        run.run()
    assert labels_by_device(store, run.id).total() == 0
    with pytest.raises(CampaignError, match="too few labels"):  # a resume repeats no failures
        campaign(store, workers := FakeWorkers(), campaign_id=run.id).run()
    assert not workers.starts
    assert order_retry(store, run.id)[1] > 0
    campaign(store, FakeWorkers(), campaign_id=run.id).run()
    assert labels_by_device(store, run.id)["cpu-2t"] >= BUDGET["cpu-2t"] - 3


@pytest.mark.parametrize("state", [CampaignState.PAUSED, CampaignState.CANCELLED])
def test_an_order_from_another_shell_stops_a_campaign(store, monkeypatch, state):
    monkeypatch.setattr(trappm.cluster.campaign.campaign, "LOOK_S", 0.0)
    run = campaign(store, FakeWorkers(at=(5, lambda: order_stop(store, None, state))))
    with pytest.raises(CampaignStopped):
        run.run()
    assert store.campaigns.get(run.id).state == state
    assert not store.assignments.of_campaign(run.id, state="leased")
    assert 4 <= labels_by_device(store, run.id).total() <= 6
    if state is CampaignState.PAUSED:
        campaign(store, FakeWorkers(), campaign_id=to_resume(store, None).id).run()
        assert labels_by_device(store, run.id) == BUDGET
        with pytest.raises(InputError, match="finished already"):
            order_stop(store, None, state)
    else:
        with pytest.raises(InputError, match="is cancelled"):
            to_resume(store, run.id)
        with pytest.raises(InputError, match="is cancelled"):
            order_retry(store, run.id, ["error"])


def test_an_order_from_another_shell_stops_the_tracing_of_graphs(store, monkeypatch):
    class OrderedAboutGraphs(FakeWorkers):
        def trace_of(self, key):
            if len(self.traced) == 1:
                order_stop(store, None, CampaignState.PAUSED)
            return super().trace_of(key)

    monkeypatch.setattr(trappm.cluster.campaign.campaign, "LOOK_S", 0.0)
    run = campaign(store, workers := OrderedAboutGraphs())
    with pytest.raises(CampaignStopped):
        run.run()
    assert (len(workers.traced), workers.traces.cancelled) == (1, 4)
    assert not store.campaigns.pool(run.id)
    assert not workers.starts
    assert store.campaigns.get(run.id).state == CampaignState.PAUSED


def test_lost_traces_are_made_again_and_a_model_with_no_other_is_left_out(store):
    def is_lost(key):
        return key.settings.precision == "amp-fp16" or key.model == "resnet18"

    class Unlucky(FakeWorkers):
        def trace_of(self, key):
            if is_lost(key):
                return Traced(key, Refusal("it ended the process"), is_final=False)
            return super().trace_of(key)

    pool = {"pool": {"groups": [{**SPEC["pool"]["groups"][0], "precisions": ["fp32", "amp-fp16"]}]}}
    run = campaign(store, workers := Unlucky(stop_after=3), **pool)
    with pytest.raises(CampaignStopped):
        run.run()
    assert sum("it ended the process" in line for line in workers.lines) == 3 + 1
    assert "resnet18" not in {c.architecture for c, _ in store.campaigns.pool(run.id)}
    campaign(store, again := FakeWorkers(), campaign_id=run.id).run()
    lost = [key for key in workers.traced if is_lost(key)]
    assert again.traced == [key for key in lost if key.model != "resnet18"]


class BusyElsewhere(FakeWorkers):
    """GPU workers and a node that traces steps until `until` measurements have begun."""

    def __init__(self, until):
        super().__init__(devices=("a100", "v100"))
        self.traces_elsewhere = True
        self._until = until

    def may_trace(self):
        each_model = 5
        return len(self.traced) < each_model or len(self.starts) >= self._until


class SlowToStart(FakeLearner):
    """A learner whose encoder is ready when asked for the third time."""

    asked = 0

    def set_pool(self, *pool):
        self.asked += 1
        if self.asked < 3:
            raise UnfinishedError
        super().set_pool(*pool)


def test_an_order_without_an_id_needs_a_single_running_campaign(store):
    ids = [store.campaigns.create(str(n), spec().model_dump(mode="json"), n).id for n in range(3)]
    store.owners.begin_campaign(ids[0])
    assert order_stop(store, None, CampaignState.PAUSED).id == ids[0]
    for id_ in ids[:2]:
        store.owners.begin_campaign(id_)
    with pytest.raises(InputError, match="2 campaigns run; name one of them"):
        order_stop(store, None, CampaignState.PAUSED)
    assert order_stop(store, ids[1], CampaignState.PAUSED).id == ids[1]


GPUS = {"devices": {"source": "a100", "target": "v100"}, "canary": False}
IN_TWO_FORMATS = {
    "pool": {
        "groups": [{**SPEC["pool"]["groups"][0], "memory_formats": ["contiguous", "channels-last"]}]
    }
}


class GoneElsewhere(BusyElsewhere):
    """The node that traces is gone at the third start, and steps are traced where GPUs measure."""

    turns = 0

    def leave(self):
        self.traces_elsewhere = False

    def may_trace(self):
        self.turns += not self.traces_elsewhere
        if self.turns == 10:
            self.started_before = len(self.starts)
        return len(self.traced) < 5 or self.turns >= 10


def test_nothing_is_measured_while_steps_are_traced_after_the_other_nodes_have_left(store):
    workers = GoneElsewhere(until=0)
    workers.at = (3, workers.leave)
    run = campaign(store, workers, **GPUS, **IN_TWO_FORMATS)
    assert run.run() == "snap1"
    assert workers.started_before == 4  # of five that were planned


def test_the_evaluation_set_is_measured_while_steps_are_traced_on_other_nodes(store):
    workers, learner = BusyElsewhere(until=3 + 2), SlowToStart()
    run = campaign(store, workers, learner, **GPUS, **IN_TWO_FORMATS)
    assert run.run() == "snap1"
    roles = {(a.device, a.configuration.id): a.role for a in store.labels.of_campaign(run.id)}
    assert [roles[start] for start in workers.starts[:6]] == ["evaluate"] * 5 + ["train"]
    assert learner.asked == 3
    assert len(workers.traced) == len(set(workers.traced)) > 0
    assert sum(labels_by_device(store, run.id).values()) == sum(BUDGET.values())


def test_a_failed_trace_beside_measurements_ends_the_campaign(store):
    class NoCluster(BusyElsewhere):
        def trace(self, keys):
            if self.traced:
                raise CampaignError("the cluster traces no steps")
            return super().trace(keys)

    run = campaign(store, NoCluster(until=1), **GPUS, **IN_TWO_FORMATS)
    with pytest.raises(CampaignError, match="traces no steps"):
        run.run()
    assert store.campaigns.get(run.id).state == "failed"


def test_an_order_from_another_shell_stops_a_campaign_that_trains_its_encoder(store, monkeypatch):
    class OrderedAboutEncoder(FakeLearner):
        def set_pool(self, pool, traces):
            order_stop(store, None, CampaignState.PAUSED)
            raise UnfinishedError

    monkeypatch.setattr(trappm.cluster.campaign.campaign, "LOOK_S", 0.0)
    run = campaign(store, FakeWorkers(), OrderedAboutEncoder())
    with pytest.raises(CampaignStopped):
        run.run()
    assert store.campaigns.get(run.id).state == "paused"
    campaign(store, FakeWorkers(), campaign_id=run.id).run()
    assert labels_by_device(store, run.id) == BUDGET


SMALL = {
    "devices": {"source": "a100"}, "evaluation": {"source": 3, "architecture_share": 0.3},
    "initial": {"source": 5}, "rounds": {"count": 2, "source": 2},
}  # fmt: skip


def test_labels_are_adopted_before_the_memory_method_is_known(store):
    """In a container NVML may hide our process, which shows only once something is measured."""
    facts = {"device": "a100", "measuring_version": 2}

    class Hidden(FakeWorkers):
        def refresh_workers(self):
            return [Worker("a1", "a100", "host", stack_fingerprint(facts))]

        def _measure(self, *arguments):
            environment = {**facts, "memory_method": "nvml device memory above its baseline"}
            return replace(super()._measure(*arguments), environment=environment)

    for starts, snapshot in ((3 + 5 + 2 * 2, "first"), (0, "second")):
        run = ran(store, workers := Hidden(), FakeLearner(snapshot), **SMALL)
        assert len(workers.starts) == starts
        assert labels_by_device(store, run.id).total() == 3 + 5 + 2 * 2


def documented_list(store, **changes):
    """The campaign file of docs/measurement.md, whose strategy is `all`."""
    page = (Path(__file__).parents[3] / "docs/measurement.md").read_text()
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    return with_whole_pool(
        parse_spec(yaml.safe_dump(yaml.safe_load(text) | changes), origin="docs"), store
    )


def changes_of(spec):
    return spec.model_dump(mode="json", exclude={"learner"})


def test_strategy_all_measures_a_list_once_and_keeps_its_labels(store):
    wanted = documented_list(store)
    pool = build_pool(wanted.pool)
    assert wanted.total == len(pool) == 9
    first, second = FakeWorkers(), FakeWorkers()
    run = campaign(store, first, **changes_of(wanted))
    run.run()
    labels = store.labels.of_campaign(run.id)
    assert {label.configuration for label in labels} == set(pool)
    assert [r.purpose for r in store.rounds.all(run.id)] == ["evaluation", "initial"]
    both = {"architectures": ["test_resnet", "test_vit"], "input_sizes": [64, 96]}
    longer = documented_list(store, seed=5, pool={"groups": [both | {"batch_sizes": [2, 4, 8]}]})
    ran(store, second, **changes_of(longer))
    assert len(second.starts) == 4  # batches of 2: the others have labels
