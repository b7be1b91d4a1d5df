"""The store among many processes, some of which die."""

import multiprocessing
import os
import re
import signal
import sqlite3
import threading
from collections import Counter

import pytest
import store_workers
from store_samples import DEVICE, campaign_with, configuration

from trappm.store import Store

PATIENCE_S = 120
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(  # what its children import would take seconds for each
    ["psycopg", "trappm.store.schema", "trappm.profiler.traced_step"]
)


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


def test_processes_that_create_a_store_at_once_all_succeed(empty_database_url, started):
    results, barrier = context.Queue(), context.Barrier(4)
    processes = [
        started(store_workers.open_store, empty_database_url, barrier, results) for _ in range(4)
    ]
    assert [results.get(timeout=PATIENCE_S) for _ in processes] == [0] * 4


def test_a_new_file_locked_by_another_process_is_waited_for(tmp_path):
    """SQLite's own wait does not cover the change to its write-ahead log: it refuses at once."""
    path = tmp_path / "labels.db"
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    ending = threading.Timer(0.3, other.execute, ["ROLLBACK"])
    ending.start()
    with Store.open(f"sqlite:///{path}") as store:
        assert store.campaigns.all() == []
    ending.join()
    other.close()


def test_competing_processes_lose_and_duplicate_no_labels(store, database_url, started):
    """Rivals of both kinds, each with a connection of its own, run campaigns to their end.

    All campaigns measure the same configurations, so that their labels have the same places.
    """
    url, campaigns, assignments, processes, threads = database_url, 2, 30, 2, 4
    what = [configuration(b) for b in range(1, assignments + 1)]
    ids = [campaign_with(store, what) for _ in range(campaigns)]
    results = context.Queue()
    barrier = context.Barrier(processes + threads)
    names = {f"worker {number}" for number in range(processes + threads)}
    for number, name in enumerate(sorted(names)):
        given = (url, ids[number % campaigns], name, barrier, results)
        if number < processes:
            started(store_workers.run_turns, *given)
        else:
            threading.Thread(target=store_workers.run_turns, args=given, daemon=True).start()
    taken = Counter()
    while names:
        worker, result = results.get(timeout=PATIENCE_S)
        if result is None:
            names.remove(worker)
        else:
            assert re.fullmatch("[0-9a-f]{32}", str(result)), f"{worker}: {result}"
            taken[result] += 1
    for campaign_id in ids:
        everything = store.assignments.of_campaign(campaign_id)
        assert {(a.state, a.failures) for a in everything} == {("done", 0)}
        assert {taken[a.id] for a in everything} == {1}
        assert store.campaigns.outcome_counts(campaign_id) == {DEVICE: {"ok": assignments}}
        assert store.campaigns.label_counts(campaign_id) == {campaign_id: assignments}
        assert store.campaigns.events(campaign_id) == []
    assert len(store.labels.find()) == assignments
    assert store.check() == []


def test_acknowledged_records_survive_a_kill(database_url, started):
    """A process is killed when it has reported this number of records."""
    acknowledged = set()
    for count in (3, 40):
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
