"""A campaign whose label store or clock is out of order for a while: it ends whole, and tells."""

from __future__ import annotations

import itertools
import sqlite3
import threading
import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from campaign_crew import BUDGET, FakeCrew, campaign, labels_by_device

import trappm.cluster.campaign
import trappm.store.database
import trappm.store.leases
from trappm.store import Assignment, Patience, Store

AWAY_S = 1.0


class FaultyAfter(FakeCrew):
    """Something happens when the n-th measurement is started."""

    def __init__(self, count, happens):
        super().__init__()
        self._count, self._happens = count, happens

    def start(self, worker, task, protocol):
        super().start(worker, task, protocol)
        if len(self.starts) == self._count:
            self._happens()


def lock(opened):
    """Another process holds the write lock."""
    other = sqlite3.connect(
        opened._engine.url.database, isolation_level=None, check_same_thread=False
    )
    other.execute("BEGIN IMMEDIATE")
    return other.close


def fill_the_disk(opened):
    """SQLite may take no more pages."""
    pool = opened._engine.pool
    connections = [pool.connect() for _ in range(pool.checkedin())]
    drivers = [connection.dbapi_connection for connection in connections]
    for connection in connections:
        connection.close()
    drivers[0].execute("VACUUM")  # no free pages are left

    def most_pages(count):
        for driver in drivers:
            driver.execute(f"PRAGMA max_page_count = {count}").fetchone()

    most_pages(1)
    return lambda: most_pages(1 << 30)


@pytest.mark.parametrize("fault", [lock, fill_the_disk])
def test_a_store_that_is_away_for_a_while_costs_no_label_and_is_told(new_store, monkeypatch, fault):
    monkeypatch.setattr(trappm.store.database, "BUSY_TIMEOUT_S", 0.05)
    url = new_store()
    mends = []
    crew = FaultyAfter(4, lambda: mends.append(fault(opened)))

    def tell(message):
        crew.campaign.note("store", message)
        if "trying again" in message:
            threading.Timer(AWAY_S, mends[0]).start()

    with Store.open(url, Patience(tell=tell)) as opened:
        run = campaign(opened, crew)
        run.run()
        assert labels_by_device(opened, run.id) == BUDGET
        counts = opened.outcome_counts(run.id)
        assert sum(c["ok"] for c in counts.values()) == len(crew.starts) == sum(BUDGET.values())
        away, back = [e.message["message"] for e in opened.events(run.id) if e.kind == "store"]
    assert "full" in away or "locked" in away
    assert "answers again" in back


def test_clocks_that_jump_cost_no_label(new_store, monkeypatch):
    jumps = itertools.cycle([0.0, 3600.0, -7200.0, 1e6])
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + next(jumps))
    monkeypatch.setattr(trappm.cluster.campaign, "time", clock)
    wall = SimpleNamespace(_time=lambda session: datetime.now(UTC) + timedelta(seconds=next(jumps)))
    monkeypatch.setattr(trappm.store.leases, "_time", wall._time)
    crew = FakeCrew()
    with Store.open(new_store()) as opened:
        run = campaign(opened, crew)
        run.run()
        assert labels_by_device(opened, run.id) == BUDGET
        assert not [e for e in opened.events(run.id) if e.kind == "lost"]
    assert len(crew.starts) == sum(BUDGET.values())


def test_what_came_back_is_recorded_though_the_loop_fails_over_it(store, monkeypatch):
    listen = trappm.cluster.campaign.Campaign._what_happened

    def fail(campaign, finished):
        if isinstance(finished.task, Assignment):
            raise ZeroDivisionError
        return listen(campaign, finished)

    run = campaign(store, FakeCrew())
    monkeypatch.setattr(trappm.cluster.campaign.Campaign, "_what_happened", fail)
    with pytest.raises(ZeroDivisionError):
        run.run()
    counts = store.outcome_counts(run.id)
    assert sum(c["ok"] for c in counts.values()) > 0
    assert store.campaign_state(run.id) == "failed"
