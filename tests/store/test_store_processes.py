"""The store among many processes, some of which die."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
from collections import Counter

import pytest
import store_workers
from sqlalchemy import make_url
from store_samples import campaign_with, configuration

from store import LabelFilter, Store

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


def test_processes_that_open_a_new_store_at_once_all_get_it(database_url, started):
    results, barrier = context.Queue(), context.Barrier(4)
    processes = [
        started(store_workers.open_store, database_url, barrier, results) for _ in range(4)
    ]
    assert [results.get(timeout=PATIENCE_S) for _ in processes] == [0] * 4


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


def test_what_was_acknowledged_survives_a_kill(database_url, started):
    acknowledged = set()
    for count in (3, 20, 50):
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
        with Store.open(database_url) as store:
            labels = store.labels()
            attempts = store.query_labels(LabelFilter(outcome="ok")).id
            kept = {store.measurement(int(number)).attempt_key for number in attempts}
        assert acknowledged <= kept
        assert len({label.configuration for label in labels}) == len(labels)
    url = make_url(database_url)
    if url.get_backend_name() == "sqlite":
        connection = sqlite3.connect(url.database)
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        connection.close()
