"""The store among many processes, some of which die."""

import multiprocessing
import threading

import pytest
import store_workers
from store_samples import DEVICE, campaign_with, configuration

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


def test_competing_campaigns_lose_and_duplicate_no_labels(store, database_url, started):
    """Processes and threads, each with a connection of its own, measure the same at once."""
    assignments, processes, threads = 30, 2, 2
    what = [configuration(b) for b in range(1, assignments + 1)]
    ids = [campaign_with(store, what) for _ in range(processes + threads)]
    results, barrier = context.Queue(), context.Barrier(len(ids))
    for number, campaign_id in enumerate(ids):
        given = database_url, campaign_id, f"host {number}", barrier, results
        if number < processes:
            started(store_workers.run_campaign, *given)
        else:
            threading.Thread(target=store_workers.run_campaign, args=given, daemon=True).start()
    ends = dict(results.get(timeout=PATIENCE_S) for _ in ids)
    assert ends == {f"host {number}": None for number in range(len(ids))}
    for campaign_id in ids:
        everything = store.assignments.of_campaign(campaign_id)
        assert {(a.state, a.attempts, a.failures) for a in everything} == {("done", 1, 0)}
        assert store.campaigns.outcome_counts(campaign_id) == {DEVICE: {"ok": assignments}}
        assert len(store.labels.of_campaign(campaign_id)) == assignments
    assert len(store.labels.find()) == assignments
    assert store.check() == []
