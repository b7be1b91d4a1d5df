"""What other processes do to a store in its tests; in a module that they can import."""

from store_samples import lease_next, measurement, owned

from trappm.store import Store


def open_store(url, barrier, results):
    barrier.wait()
    with Store.open(url) as store:
        results.put(len(store.campaigns.all()))


def run_campaign(url, campaign_id, name, barrier, results):
    """Run a campaign to its end; tell its name and what goes wrong."""
    try:
        with Store.open(url) as store:
            mine = owned(store, campaign_id, name)
            barrier.wait()
            while lease := lease_next(mine, campaign_id):
                result = measurement(lease.configuration, attempt_key=lease.attempt_key)
                mine.measurements.record([(result, lease.id)])
        results.put((name, None))
    except BaseException as error:
        results.put((name, repr(error)))
        raise
