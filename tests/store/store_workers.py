"""What other processes do to a store in its tests; in a module that they can import."""

from __future__ import annotations

from store_samples import DEVICE, configuration, measurement

from store import Store


def open_store(url, barrier, results):
    barrier.wait()
    with Store.open(url) as store:
        results.put(len(store.campaigns()))


def lease_and_record(url, campaign_id, worker, barrier, results):
    """Takes assignments until there are none, and says which."""
    with Store.open(url) as store:
        barrier.wait()
        while (lease := store.lease(campaign_id, DEVICE, worker, 60)) is not None:
            result = measurement(lease.configuration, attempt_key=lease.attempt_key)
            store.record(result, assignment_id=lease.id)
            results.put((worker, lease.id))
    results.put((worker, None))


def record_for_ever(url, acknowledged):
    """Records one measurement after the other, and tells each key once it is acknowledged."""
    with Store.open(url) as store:
        batch_size = 0
        while True:
            batch_size += 1
            result = measurement(configuration(batch_size))
            store.record(result)
            acknowledged.send(result.attempt_key)
