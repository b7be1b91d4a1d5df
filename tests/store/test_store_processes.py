"""The store among many processes, some of which die."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import sqlite3
import threading
import time
from collections import Counter

import pytest
import store_workers
from sqlalchemy import create_engine
from store_samples import DEVICE, campaign_with, configuration, measurement

from trappm.store import Store

PATIENCE_S = 120
context = multiprocessing.get_context("spawn")


@pytest.fixture
def started():
    """Starts functions of `store_workers` in processes, which end with the test."""
    processes = []

    def start(function, *arguments):
        process = context.Process(target=function, args=arguments, daemon=True)
        process.start()
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.join()


def test_processes_that_open_a_new_store_at_once_all_get_it(empty_database_url, started):
    results, barrier = context.Queue(), context.Barrier(4)
    processes = [
        started(store_workers.open_store, empty_database_url, barrier, results) for _ in range(4)
    ]
    assert [results.get(timeout=PATIENCE_S) for _ in processes] == [0] * 4


def test_a_new_file_that_another_writes_to_is_waited_for(tmp_path):
    """SQLite's own wait does not cover the change to its write-ahead log: it refuses at once."""
    path = tmp_path / "labels.db"
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    ending = threading.Timer(0.3, other.execute, ["ROLLBACK"])
    ending.start()
    with Store.open(f"sqlite:///{path}") as store:
        assert store.campaigns() == []
    ending.join()
    other.close()


def test_processes_that_lease_at_once_never_get_the_same(store, database_url, started):
    campaign_id = campaign_with(store, [configuration(b) for b in range(1, 61)])
    results, barrier = context.Queue(), context.Barrier(4)
    names = ("a", "b", "c", "d")
    for name in names:
        started(store_workers.lease_and_record, database_url, campaign_id, name, barrier, results)
    taken, ended = [], set()
    while ended != set(names):
        worker, assignment_id = results.get(timeout=PATIENCE_S)
        if assignment_id is None:
            ended.add(worker)
        else:
            taken.append(assignment_id)
    assert max(Counter(taken).values()) == 1
    assert sorted(taken) == sorted(a.id for a in store.assignments(campaign_id))
    assert len(store.campaign_labels(campaign_id)) == 60
    assert all(a.attempts == 1 for a in store.assignments(campaign_id))


def work_together(store, url, started, *, assignments, processes, threads):
    """Workers of both kinds, each with a connection of its own, measure a campaign to its end."""
    campaign_id = campaign_with(store, [configuration(b) for b in range(1, assignments + 1)])
    results = context.Queue()
    barrier = context.Barrier(processes + threads)
    names = {f"worker {number}" for number in range(processes + threads)}
    for number, name in enumerate(sorted(names)):
        what = (url, campaign_id, name, barrier, results)
        if number < processes:
            started(store_workers.lease_beat_and_record, *what)
        else:
            threading.Thread(
                target=store_workers.lease_beat_and_record, args=what, daemon=True
            ).start()
    taken = Counter()
    while names:
        worker, what = results.get(timeout=PATIENCE_S)
        if what is None:
            names.remove(worker)
        else:
            assert re.fullmatch("[0-9a-f]{32}", str(what)), f"{worker}: {what}"
            taken[what] += 1
    everything = store.assignments(campaign_id)
    assert taken == Counter(a.id for a in everything)
    assert {(a.state, a.attempts, a.failures) for a in everything} == {("done", 1, 0)}
    labels = store.campaign_labels(campaign_id)
    assert len(labels) == len({x.configuration for x in labels}) == assignments
    assert store.outcome_counts(campaign_id) == {DEVICE: {"ok": assignments}}
    assert store.events(campaign_id) == []


def test_workers_of_both_kinds_lose_no_label_and_make_none_twice(store, database_url, started):
    work_together(store, database_url, started, assignments=60, processes=2, threads=6)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # 1,000 leases on a machine that may be busy
def test_many_workers_lose_no_label_and_make_none_twice(store, database_url, started):
    """64 at once on PostgreSQL, 8 processes on SQLite."""
    sqlite = database_url.startswith("sqlite")
    processes, threads = (8, 0) if sqlite else (16, 48)
    work_together(
        store, database_url, started, assignments=1000, processes=processes, threads=threads
    )


def test_a_worker_that_beats_keeps_its_lease_and_one_that_stops_loses_it(
    store, database_url, started
):
    campaign_id = campaign_with(store, [configuration()])
    lease = store.lease(campaign_id, DEVICE, "w", 600)  # until the first beat
    stop = context.Event()
    beating = started(store_workers.keep_alive, database_url, lease, 4.0, 0.2, stop)
    ends = set()
    while len(ends) < 4:
        ends.add(store.assignments(campaign_id)[0].lease_expires_at)
        assert store.lease(campaign_id, DEVICE, "other", 60) is None
        assert beating.is_alive()
    os.kill(beating.pid, signal.SIGKILL)
    while (again := store.lease(campaign_id, DEVICE, "other", 60)) is None:
        time.sleep(0.1)
    assert (again.id, again.attempts, again.failures) == (lease.id, 2, 1)
    assert not store.heartbeat(lease, 60)
    late = measurement(attempt_key=lease.attempt_key)
    now = measurement(attempt_key=again.attempt_key)
    assert store.record(late, assignment_id=lease.id).is_new
    assert store.record(now, assignment_id=lease.id).is_new
    assert store.outcome_counts(campaign_id) == {DEVICE: {"ok": 2}}
    (label,) = store.campaign_labels(campaign_id)
    assert store.measurement(label.measurement_id) == late
    assert len(store.labels()) == 1
    assert [(a.state, a.attempts) for a in store.assignments(campaign_id)] == [("done", 2)]


def test_what_one_worker_is_just_being_given_is_stepped_over_by_others(store, database_url):
    """SELECT FOR UPDATE SKIP LOCKED; SQLite lets only one in at a time."""
    if database_url.startswith("sqlite"):
        pytest.skip("SQLite has one writer at a time")
    campaign_id = campaign_with(store, [configuration(b) for b in (1, 2)])
    engine = create_engine(database_url)
    with engine.begin() as other:
        first = other.exec_driver_sql(
            "SELECT id FROM assignments ORDER BY rank LIMIT 1 FOR UPDATE"
        ).scalar_one()
        lease = store.lease(campaign_id, DEVICE, "w", 60)  # a lock waited for would never end
        assert lease.id != first
        assert store.lease(campaign_id, DEVICE, "w", 60) is None
    assert store.lease(campaign_id, DEVICE, "w", 60).id == first
    engine.dispose()


def test_what_was_acknowledged_survives_a_kill(database_url, started):
    kill_while_it_records(database_url, started, (3, 20, 50))


@pytest.mark.slow
@pytest.mark.timeout(1200)  # 20 processes import the store, and record 10,000 times
def test_what_was_acknowledged_survives_twenty_kills(database_url, started):
    """Each of them at some moment of 1,000 writes."""
    generator = random.Random(5)
    kill_while_it_records(database_url, started, [generator.randrange(1, 1000) for _ in range(20)])


def kill_while_it_records(database_url, started, counts):
    """Kills a process when it has told of so many records, for each count; looks what is there."""
    acknowledged = set()
    for count in counts:
        ours, theirs = context.Pipe(duplex=False)
        process = started(store_workers.record_for_ever, database_url, theirs)
        theirs.close()
        for _ in range(count):
            assert ours.poll(PATIENCE_S)
            acknowledged.add(ours.recv())
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        try:
            while True:
                acknowledged.add(ours.recv())  # what it still said before it died
        except EOFError:
            pass
        with Store.open_to_read(database_url) as store:
            kept, _ = store.query_sql("SELECT attempt_key FROM measurements", limit=100_000)
            assert acknowledged <= set(kept.attempt_key)
            assert store.check() == []
