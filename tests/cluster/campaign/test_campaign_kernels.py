"""A campaign knows its devices by their kernels, before anything else is measured on them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from campaign_crew import BUDGET, FakeLearner, FakeWorkers, campaign, labels_by_device, ran, spec
from store_whole import kernel

from trappm.cluster.campaign.host_checks import HostChecks
from trappm.cluster.scheduler.messages import Worker
from trappm.cluster.spec import Characterisation, load_preset
from trappm.profiler.errors import InputError
from trappm.profiler.host.environment import utc_now
from trappm.profiler.records import Outcome

CPUS = {"characterise": {"seconds": 5, "cpus": True}, "canary": False}
GPU = Worker("one", "a100", "host", "stack")
DAYS = timedelta(days=1)


def kernels(device, count=3, **further):
    return [
        kernel(
            device=device,
            **{
                "batch": batch, "time_ms": 0.5, "started_at": utc_now(),
                "attempt_key": f"{device} {batch} {utc_now()}",
                "environment": {"device": device, "stack_fingerprint": "stack"}, **further,
            },
        )
        for batch in range(1, count + 1)
    ]  # fmt: skip


def crew(**further):
    devices = ("cpu-2t", "cpu-1t")
    return FakeWorkers(
        **{"kernels": {d: [kernels(d) for _ in range(9)] for d in devices}} | further
    )


def done_by(workers, name):
    return [what for worker, what in workers.done if worker == name]


def test_kernels_come_first_and_once(store):
    workers = crew()
    run = ran(store, workers, **CPUS)
    for name, device in (("w-cpu-2t", "cpu-2t"), ("w-cpu-1t", "cpu-1t")):
        assert done_by(workers, name) == ["kernels", *["label"] * BUDGET[device]]
    assert store.kernels.devices() == {"cpu-2t": 3, "cpu-1t": 3}
    assert labels_by_device(store, run.id) == BUDGET
    assert sum("3 kernels timed" in line for line in workers.lines) == 2


class Hearing(FakeLearner):
    def fit(self, labels, kernels):
        self.heard = {device: len(known) for device, known in kernels.items()}
        return super().fit(labels, kernels)


def test_the_learner_gets_the_kernels_of_the_stack_of_its_labels(store):
    other = {"device": "cpu-1t", "stack_fingerprint": "another"}
    workers, learner = crew(), Hearing()
    workers.timed_kernels["cpu-1t"] = [kernels("cpu-1t", environment=other)]
    campaign(store, workers, learner, **CPUS).run()
    assert learner.heard == {"cpu-2t": 3, "cpu-1t": 0}


@pytest.mark.parametrize("off", [{}, {"characterise": False}, {"characterise": None}])
def test_kernels_of_cpus_are_timed_only_on_request(store, off):
    workers = crew()
    campaign(store, workers, canary=False, **off).run()
    assert {what for _, what in workers.done} == {"label"}


def test_kernels_are_timed_by_default_on_gpus_but_not_on_simulated_devices(store):
    checks = HostChecks(store, "", None, spec().characterise)
    assert checks.is_due(GPU)
    assert checks.begin(GPU).seconds == 60
    for device in ("simulated:a100", "replay:labels.csv"):
        assert not checks.is_due(Worker("w", device, "host", "stack"))
    other = Worker("two", "a100", "host", "stack")
    assert not checks.is_due(other)  # one worker does it
    checks.forget(GPU)  # it was lost
    assert checks.is_due(other)
    laptop = load_preset("laptop")
    checks = HostChecks(store, "", None, laptop.characterise)
    assert not any(checks.is_due(Worker("w", d, "host", "stack")) for d in laptop.devices.keys)


@pytest.mark.parametrize(
    ("device", "stack", "age", "outcome", "is_due"),
    [
        ("a100", "stack", 1 * DAYS, "ok", False),
        ("a100", "stack", 40 * DAYS, "ok", True),
        ("a100", "stack", 1 * DAYS, "error", True),
        ("a100", "another", 1 * DAYS, "ok", True),
        ("v100", "stack", 1 * DAYS, "ok", True),
    ],
)
def test_recent_kernels_of_the_same_device_and_stack_are_enough(
    store, device, stack, age, outcome, is_due
):
    store.kernels.record(
        kernels(
            device, started_at=(datetime.now(UTC) - age).isoformat(), outcome=Outcome(outcome),
            environment={"device": device, "stack_fingerprint": stack},
            time_ms=0.5 if outcome == "ok" else None,
        )
    )  # fmt: skip
    assert HostChecks(store, "", None, Characterisation()).is_due(GPU) == is_due


DRIFT = {
    "configuration": {"architecture": "resnet10t", "batch_size": 1, "input_size": 64},
    "every_measurements": 3, "reference_readings": 1,
}  # fmt: skip


@pytest.mark.parametrize(("again", "later"), [("timed", 10.0), ("lost", 11.2)])
def test_the_kernels_of_a_drifting_device_are_timed_once_more(store, again, later):
    runs = [kernels("cpu-2t"), kernels("cpu-2t", 4) if again == "timed" else "lost"]
    workers = crew(
        canary={"w-cpu-2t": [10.0, 11.2, 11.2, 11.2, later, 11.2, 11.2, 11.2, 11.2, 11.2]},
        kernels={"cpu-2t": [*runs, "lost"], "cpu-1t": [kernels("cpu-1t")]},
    )
    ran(store, workers, **CPUS | {"canary": DRIFT})
    done = done_by(workers, "w-cpu-2t")
    assert done[:2] == ["canary", "kernels"]
    assert done[5:8] == ["canary", "canary", "kernels"]  # confirmed first
    assert done.count("kernels") == 2  # it drifts on, which is no news
    assert store.kernels.devices()["cpu-2t"] == (7 if again == "timed" else 3)


def test_a_kernel_that_cannot_be_recorded_does_not_affect_the_others(store):
    bad = kernels("cpu-2t", 1, message="a \x00 b", batch=77)
    some = [*kernels("cpu-2t"), *bad]
    workers = crew(kernels={"cpu-2t": [some], "cpu-1t": [kernels("cpu-1t")]})
    campaign(store, workers, **CPUS).run()
    kept = [*store.kernels.each(device="cpu-2t")]
    assert [k.outcome for k in kept] == [Outcome.OK] * 3 + [Outcome.ERROR]
    assert "cannot be recorded" in kept[-1].message
    assert any("3 kernels timed, 1 not" in line for line in workers.lines)


@pytest.mark.parametrize("bad", [[[]], ["lost", "lost"]])
def test_a_device_whose_kernels_cannot_be_timed_is_still_measured(store, bad):
    workers = crew(kernels={"cpu-2t": bad, "cpu-1t": [kernels("cpu-1t")]})
    run = campaign(store, workers, **CPUS)
    assert run.run() == "snap1"
    assert labels_by_device(store, run.id) == BUDGET
    assert done_by(workers, "w-cpu-2t").count("kernels") == len(bad)
    words = "its GPU is gone" if bad == [[]] else "the profiler crashed"
    assert any(f"kernels  {words}" in line or f"timed: {words}" in line for line in workers.lines)


@pytest.mark.parametrize(
    "bad", [{"seconds": 0}, {"seconds": "long"}, {"minutes": 1}, {"again_after_days": -1}, True]
)
def test_invalid_settings_are_refused(bad):
    with pytest.raises(InputError, match="characterise"):
        spec(characterise=bad)
