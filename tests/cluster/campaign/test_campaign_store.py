"""A campaign whose label store or clock is out of order for a while: it ends whole, and tells."""

from __future__ import annotations

import itertools
import sqlite3
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from fakes import (
    BUDGET,
    ONE_DEVICE,
    FakeLearner,
    FakeWorkers,
    campaign,
    labels_by_device,
    ran,
)
from store_samples import fill_the_disk, lost_reply

import trappm.cluster.campaign.campaign
import trappm.store.engine
import trappm.store.owners
from trappm.cluster.campaign.campaign import CampaignStopped
from trappm.profiler.errors import StoreError
from trappm.profiler.records import Configuration, StepSummary
from trappm.reports.campaign_facts import campaign_facts, campaign_rows
from trappm.store import Assignment, Patience, Store
from trappm.store.labels import Labels
from trappm.store.measurements import Canaries
from trappm.store.transactions import IMPATIENT

AWAY_S = 0.3


def lock(opened):
    """Another process holds the write lock."""
    other = sqlite3.connect(
        opened.database.engine.url.database, isolation_level=None, check_same_thread=False
    )
    other.execute("BEGIN IMMEDIATE")
    return other.close


@pytest.mark.parametrize("fault", [lock, fill_the_disk])
def test_no_label_is_lost_while_the_store_is_unavailable(new_store, monkeypatch, fault):
    monkeypatch.setattr(trappm.store.engine, "BUSY_TIMEOUT_S", 0.05)
    url = new_store()
    repairs = []
    workers = FakeWorkers(at=(4, lambda: repairs.append(fault(opened))))

    def tell(message):
        workers.campaign.note("store", message)
        if "trying again" in message:
            threading.Timer(AWAY_S, repairs[0]).start()

    with Store.open(url, Patience(tell=tell)) as opened:
        run = ran(opened, workers)
        assert labels_by_device(opened, run.id) == BUDGET
        counts = opened.campaigns.outcome_counts(run.id)
        assert sum(c["ok"] for c in counts.values()) == len(workers.starts) == sum(BUDGET.values())
        away, back = [
            e.message["message"] for e in opened.campaigns.events(run.id) if e.kind == "store"
        ]
    assert "full" in away or "locked" in away
    assert "answers again" in back


def test_a_disk_that_stays_full_is_waited_for_once_and_the_campaign_can_go_on(
    new_store, monkeypatch
):
    monkeypatch.setattr(trappm.store.engine, "BUSY_TIMEOUT_S", 0.05)
    told, repairs = [], []
    with Store.open(new_store(), Patience(wait_s=0.3, tell=told.append)) as opened:
        workers = FakeWorkers(at=(4, lambda: repairs.append(fill_the_disk(opened))))
        run = campaign(opened, workers)
        with pytest.raises(StoreError, match="waited 0 s for it in vain"):
            run.run()
        assert sum("trying again" in line for line in told) == 1
        repairs[0]()
        campaign(opened, FakeWorkers(), campaign_id=run.id).run()
        assert labels_by_device(opened, run.id) == BUDGET


def test_a_full_disk_is_waited_for_once_by_canaries_too(store, monkeypatch):
    """The second canary is back by the time that the first one could not be stored."""

    class OneByOne(FakeWorkers):
        def wait(self, timeout_s):
            self._running, later = self._running[:1], self._running[1:]
            finished, self._running = super().wait(timeout_s), later
            return finished

    def save(self, *_, **__):
        waits.append(self._database.patience is not IMPATIENT)
        raise StoreError("the disk is full")

    waits = []
    monkeypatch.setattr(Canaries, "save", save)
    devices = {"source": "a100", "target": "v100"}
    canary = {"configuration": {"architecture": "resnet10t", "batch_size": 1, "input_size": 64}}
    workers = OneByOne(devices=("a100", "v100"))
    with pytest.raises(StoreError, match="the disk is full"):
        campaign(store, workers, devices=devices, canary=canary).run()
    assert waits == [True, False]


def test_no_label_is_lost_when_clocks_jump(new_store, monkeypatch):
    jumps = itertools.cycle([0.0, 3600.0, -7200.0, 1e6])

    def wall(connection):
        return datetime.now(UTC) + timedelta(seconds=next(jumps))

    monkeypatch.setattr(trappm.store.owners, "database_time", wall)
    monkeypatch.setattr(trappm.store.campaigns, "database_time", wall)
    workers = FakeWorkers()
    with Store.open(new_store()) as opened:
        run = campaign(opened, workers, clock=lambda: time.monotonic() + next(jumps))
        run.run()
        assert labels_by_device(opened, run.id) == BUDGET
        assert not [e for e in opened.campaigns.events(run.id) if e.kind == "lost"]
    assert len(workers.starts) == sum(BUDGET.values())


def test_what_was_measured_is_recorded_although_the_loop_fails(store, monkeypatch):
    class Failing(FakeWorkers):
        def refresh_workers(self):
            if len(self.starts) >= 5:  # with a measurement that is back
                raise ZeroDivisionError
            return super().refresh_workers()

    run = campaign(store, workers := Failing())
    with pytest.raises(ZeroDivisionError):
        run.run()
    assert labels_by_device(store, run.id).total() == len(workers.starts) == 5
    assert store.campaigns.state(run.id) == "failed"


IMPOSSIBLE = {
    "a step of no time": {"step": StepSummary(median_ms=0.0, mean_ms=0.0, iqr_ms=0.0, p95_ms=0.0)},
    "a sample for float32 too long": {"step_samples_ms": (1e300,)},
    "a text with a NUL": {"environment": {"cpu_model": "a\0b"}},
    "something that is no JSON": {"environment": {"clocks": np.float32(1.0)}},
    "something else": {"configuration": Configuration(
        architecture="resnet50", batch_size=1, input_size=64)},
    "another key": {"attempt_key": "my own"},
    "a time that is none": {"started_at": "yesterday"},
    "memory that is a text": {"memory_mib": "12"},
    "nothing at all": {"step": None, "step_samples_ms": (), "memory_mib": None},
}  # fmt: skip


@pytest.mark.parametrize("changes", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_measurement_that_cannot_be_recorded_becomes_an_error_with_the_reason(store, changes):
    class Odd(FakeWorkers):
        """What was started first is answered like that, again and again."""

        def _measure(self, worker, task, cost, fault):
            made = super()._measure(worker, task, cost, fault)
            is_odd = self.starts and task.configuration.id == self.starts[0][1]
            return replace(made, **changes) if is_odd else made

    run = ran(store, Odd(workers=[("a", "cpu-2t")]), **ONE_DEVICE)
    outcomes = store.campaigns.outcome_counts(run.id)["cpu-2t"]
    assert outcomes == {"ok": BUDGET["cpu-2t"] - 1, "error": 3}
    messages, _ = store.query_sql("SELECT message FROM measurements WHERE outcome = 'error'")
    assert all("cannot be recorded: " in message for message in messages.message)
    assert store.campaigns.state(run.id) == "finished"
    assert store.check() == []


class Refused(FakeWorkers):
    """Four GPUs at once; the database refuses every result of the configuration begun first."""

    def __init__(self, first=None, **fields):
        names = ["a1", "a2", "a3", "v1"]
        devices = ["a100", "a100", "a100", "v100"]
        super().__init__(workers=[*zip(names, devices, strict=True)], **fields)
        self.first = first

    def start(self, worker, task, protocol):
        super().start(worker, task, protocol)
        if isinstance(task, Assignment):
            self.first = self.first or task.configuration.id

    def _measure(self, worker, task, cost, fault):
        made = super()._measure(worker, task, cost, fault)
        return replace(made, memory_mib=666.0) if task.configuration.id == self.first else made


def test_a_result_that_a_constraint_refuses_is_recorded_as_an_error(store):
    """Also by a process that continues, and meets it again."""
    with store.database.writing() as session:
        session.connection().exec_driver_sql(
            "CREATE TRIGGER refuse BEFORE INSERT ON measurements WHEN NEW.memory_mib = 666.0"
            " BEGIN SELECT RAISE(ABORT, 'CHECK constraint failed: unlucky'); END"
        )
    devices = {"devices": {"source": "a100", "target": "v100"}}
    workers = Refused(stop_after=7)
    run = campaign(store, workers, **devices)
    with pytest.raises(CampaignStopped):
        run.run()
    before = store.campaigns.outcome_counts(run.id)
    assert sum(counts["ok"] for counts in before.values()) > 1
    assert sum(counts.get("error", 0) for counts in before.values()) >= 1
    run = campaign(store, Refused(workers.first), campaign_id=run.id)
    assert run.run() == "snap1"
    outcomes = store.campaigns.outcome_counts(run.id)
    refused = [a for a in store.assignments.of_campaign(run.id)
               if a.configuration.id == workers.first]  # fmt: skip
    assert [a.state for a in refused] == ["failed"] * len(refused)
    errors = sum(counts.get("error", 0) for counts in outcomes.values())
    assert errors == sum(a.attempts for a in refused) >= 3 * len(refused)
    assert labels_by_device(store, run.id).total() == sum(BUDGET.values()) - len(refused)
    messages, _ = store.query_sql("SELECT message FROM measurements WHERE outcome = 'error'")
    assert all("CHECK constraint failed: unlucky" in message for message in messages.message)
    assert store.check() == []


def test_labels_are_adopted_although_a_reply_of_the_store_is_lost(new_store):
    patience = Patience(tell=lambda line: None, sleep=lambda seconds: None)
    with Store.open(new_store(), patience) as store:
        campaign(store, FakeWorkers()).run()
        workers = FakeWorkers()
        run = campaign(store, workers, FakeLearner("snap2"))
        adopt = run.store.assignments.adopt_labels

        def adopt_without_reply(*arguments):
            with lost_reply(run.store):
                return adopt(*arguments)

        run.store.assignments.adopt_labels = adopt_without_reply
        assert run.run() == "snap2"
        assert labels_by_device(store, run.id) == BUDGET
        assert workers.starts == []


def labels_are_not_loaded(*_, **__):
    raise AssertionError("every label is loaded")


def test_counting_labels_does_not_load_them(store, monkeypatch):
    run = ran(store, FakeWorkers(), stop={"labels": 9})
    counted = labels_by_device(store, run.id).total()
    monkeypatch.setattr(Labels, "of_campaign", labels_are_not_loaded)
    monkeypatch.setattr(Labels, "find", labels_are_not_loaded)
    assert [row.labels for row in campaign_rows(store)] == [counted] == [9]
    assert sum(d.done for d in campaign_facts(store, run.id).devices.values()) == 9
    assert store.campaigns.standing(run.id).labels == 9
