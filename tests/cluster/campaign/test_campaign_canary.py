"""Campaigns watched by their canary, and campaigns on devices that are none."""

from __future__ import annotations

import itertools

import pytest
from fakes import (
    BUDGET,
    FakeLearner,
    FakeWorkers,
    campaign,
    labels_by_device,
    ran,
)

from trappm.cluster.campaign.campaign import CanaryStopError
from trappm.cluster.campaign.workers import SET_ASIDE_S
from trappm.profiler.records import Provenance

CANARY = {
    "configuration": {"architecture": "resnet10t", "batch_size": 1, "input_size": 64},
    "every_measurements": 4,
    "reference_readings": 1,
}


def after_each_canary(workers, name):
    """How many labels a worker measures after each of its canaries."""
    done = [what for worker, what in workers.done if worker == name]
    assert done[0] == "canary"
    cuts = [i for i, what in enumerate(done) if what == "canary"] + [len(done)]
    return [end - begin - 1 for begin, end in itertools.pairwise(cuts)]


def test_every_worker_measures_its_canary_first_and_then_as_planned(store):
    run = ran(store, workers := FakeWorkers(), canary=CANARY)
    assert after_each_canary(workers, "w-cpu-2t") == [4, 4, 3]
    assert after_each_canary(workers, "w-cpu-1t") == [4, 2]
    assert labels_by_device(store, run.id) == BUDGET
    assert [r.decision for r in store.canaries.all(campaign_id=run.id)] == ["ok"] * 5
    assert [r.reference_ms for r in store.canaries.all(device="cpu-2t")] == [None, 10, 10]
    assert len(store.labels.find()) == sum(BUDGET.values())  # canaries are no labels
    ran(store, FakeWorkers(), seed=8, canary=CANARY)
    references = [r.reference_ms for r in store.canaries.all(device="cpu-2t")]
    assert references[3] == 10.0  # of all campaigns


MANY = {
    "devices": {"source": "a100"},
    "evaluation": {"source": 20, "architecture_share": 0.3},
    "initial": {"source": 20},
    "rounds": {"count": 2, "source": 20},
    "pool": {"groups": [{
        "architectures": ["resnet10t", "resnet14t", "resnet18", "vgg11", "convnext_atto"],
        "batch_sizes": list(range(1, 41)), "input_sizes": [64],
    }]},
}  # fmt: skip
GPUS = [(f"gpu-{i}", "a100") for i in range(8)]


@pytest.mark.parametrize(("canary", "wasted"), [(CANARY, 1), (False, 3)])
def test_a_sick_gpu_wastes_few_attempts(store, canary, wasted):
    workers = FakeWorkers(workers=GPUS, sick={"gpu-1": 30, "gpu-5": 30})
    run = campaign(store, workers, canary=canary, **MANY)
    assert run.run() == "snap1"
    assert +workers.wasted == dict.fromkeys(workers.sick, wasted)
    assert workers.at_most == {"a100": 16 + 2}  # others may take the place of the two
    assert labels_by_device(store, run.id) == {"a100": 80}  # nothing was given up


def test_a_worker_that_was_set_aside_measures_again_once_it_is_repaired(store):
    """Until then it keeps its GPU, and the seven others go on."""

    def repair():
        workers.sick.clear()
        now[0] += SET_ASIDE_S

    now = [0.0]
    workers = FakeWorkers(workers=GPUS, sick={"gpu-1": 0}, at=(40, repair))
    run = campaign(store, workers, clock=lambda: now[0], canary=CANARY, **MANY)
    assert run.run() == "snap1"
    labels = [name for name, what in workers.done if what == "label"]
    assert labels[:40].count("gpu-1") == 0
    assert "gpu-1" in labels[40:]
    assert set(labels[:40]) >= {name for name, _ in GPUS} - {"gpu-1"}
    of_it = [what for name, what in workers.done if name == "gpu-1"]
    assert of_it[:5] == ["canary", "canary", "canary", "label", "label"]


@pytest.mark.parametrize("bad", [20.0, 5.0, "error", "lost"])
def test_a_campaign_without_a_healthy_worker_pauses_and_can_be_resumed(store, bad, refused):
    workers = FakeWorkers(canary={"w-cpu-2t": [10.0, bad, bad, bad]})
    run = campaign(store, workers, canary=CANARY)
    words = f"cpu-2t.*trappm campaign resume {run.id}"
    with refused(words, CanaryStopError):
        run.run()
    assert store.campaigns.get(run.id).state == "paused"
    assert after_each_canary(workers, "w-cpu-2t") == [4, 0, 0]
    # the other device went on to the end of the round
    assert labels_by_device(store, run.id) == {"cpu-2t": 4, "cpu-1t": 2 + 2}
    assert not store.rounds.all(run.id)[-1].is_closed
    recorded = {(x.device, x.configuration.id) for x in store.labels.of_campaign(run.id)}

    well = FakeWorkers()
    assert campaign(store, well, campaign_id=run.id).run() == "snap1"
    assert well.done[0] == ("w-cpu-2t", "canary")
    assert labels_by_device(store, run.id) == BUDGET
    assert not recorded & set(well.starts)


def test_a_lost_worker_is_followed_by_a_canary(store):
    workers = FakeWorkers(faults={2: "lost"})
    ran(store, workers, canary=CANARY | {"every_measurements": 99})
    assert after_each_canary(workers, "w-cpu-2t") == [2, BUDGET["cpu-2t"] - 1]


SIMULATED = {"devices": {"source": "simulated:a100", "target": "simulated:v100"}}


def test_a_campaign_on_simulated_devices_publishes_nothing(store):
    devices = SIMULATED["devices"].values()
    workers, learner = FakeWorkers(devices=devices), FakeLearner()
    run = campaign(store, workers, learner, **SIMULATED)
    assert run.run() is None
    record = store.campaigns.get(run.id)
    assert (record.state, record.snapshot) == ("finished", None)
    labels = store.labels.of_campaign(run.id)
    assert {x.provenance for x in labels} == {Provenance.SIMULATED}
    assert len(labels) == sum(BUDGET.values())
    assert {what for _, what in workers.done} == {"label"}  # nothing there can drift
    ran(store, again := FakeWorkers(devices=devices), **SIMULATED)
    assert len(again.starts) == sum(BUDGET.values())  # simulated labels are not adopted
