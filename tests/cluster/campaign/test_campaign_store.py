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
    FakeWorkers,
    campaign,
    labels_by_device,
    ran,
)
from store_samples import fill_the_disk

import trappm.cluster.campaign.campaign
import trappm.store.engine
import trappm.store.owners
from trappm.profiler.errors import StoreError
from trappm.profiler.records import Configuration, StepSummary
from trappm.store import Patience, Store

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
    "something that is no JSON": {"environment": {"clocks": np.float32(1.0)}},
    "something else": {"configuration": Configuration(
        architecture="resnet50", batch_size=1, input_size=64)},
    "nothing at all": {"step": None, "step_samples_ms": (), "memory_mib": None},
}  # fmt: skip


class Odd(FakeWorkers):
    """The results of what was started first have these values; another one comes in with each."""

    def __init__(self, **changes):
        super().__init__(workers=[("a", "a100"), ("b", "a100")])
        self._changes = changes

    def _measure(self, worker, task, cost, fault):
        made = super()._measure(worker, task, cost, fault)
        is_odd = self.starts and task.configuration.id == self.starts[0][1]
        return replace(made, **self._changes) if is_odd else made


def assert_it_becomes_an_error(store, workers, reason):
    run = ran(store, workers, **ONE_DEVICE | {"devices": {"source": "a100"}}, canary=False)
    outcomes = store.campaigns.outcome_counts(run.id)["a100"]
    assert outcomes == {"ok": BUDGET["cpu-2t"] - 1, "error": 3}
    messages, _ = store.query_sql("SELECT message FROM measurements WHERE outcome = 'error'")
    assert all(reason in message for message in messages.message)
    assert store.campaigns.state(run.id) == "finished"
    assert store.check() == []


@pytest.mark.parametrize("changes", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_measurement_that_cannot_be_recorded_becomes_an_error_with_the_reason(store, changes):
    assert_it_becomes_an_error(store, Odd(**changes), "cannot be recorded: ")


def test_a_result_that_a_constraint_refuses_is_recorded_as_an_error(store):
    with store.database.writing() as session:
        session.connection().exec_driver_sql(
            "CREATE TRIGGER refuse BEFORE INSERT ON measurements WHEN NEW.memory_mib = 666.0"
            " BEGIN SELECT RAISE(ABORT, 'CHECK constraint failed: unlucky'); END"
        )
    assert_it_becomes_an_error(store, Odd(memory_mib=666.0), "CHECK constraint failed: unlucky")
