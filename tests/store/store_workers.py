"""What other processes do to a store in its tests; in a module that they can import."""

from __future__ import annotations

from store_samples import DEVICE, configuration, measurement

from trappm.store import Store


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


def lease_beat_and_record(url, campaign_id, worker, barrier, results, lease_s=600.0):
    """As `lease_and_record`, with a heartbeat meanwhile; what goes wrong is told, too."""
    try:
        with Store.open(url) as store:
            barrier.wait()
            while (lease := store.lease(campaign_id, DEVICE, worker, lease_s)) is not None:
                if not store.heartbeat(lease, lease_s):
                    raise AssertionError(f"{worker} lost {lease.id} while it measured")
                result = measurement(lease.configuration, attempt_key=lease.attempt_key)
                if not store.record(result, assignment_id=lease.id).is_new:
                    raise AssertionError(f"{worker} recorded {lease.id} a second time")
                results.put((worker, lease.id))
        results.put((worker, None))
    except BaseException as error:
        results.put((worker, error if isinstance(error, AssertionError) else repr(error)))
        raise


def keep_alive(url, lease, lease_s, pause_s, stop):
    """Prolongs a lease until told to stop."""
    with Store.open(url) as store:
        while not stop.wait(pause_s):
            if not store.heartbeat(lease, lease_s):
                return
