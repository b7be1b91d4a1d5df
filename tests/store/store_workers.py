"""What other processes do to a store in its tests; in a module that they can import."""

import contextlib
import itertools
import random
import time

from store_samples import DEVICE, configuration, measurement, process

from trappm.store import NotOwnerError, Store
from trappm.store.owners import OwnedError


def open_store(url, barrier, results):
    barrier.wait()
    with Store.open(url) as store:
        results.put(len(store.campaigns.all()))


def run_turns(url, campaign_id, name, barrier, results, turns=5):
    """Runs a campaign together with rivals, each of which takes it over again and again.

    Who has it records what it leased and leases more, a turn at a time, as a campaign does. Who
    lost it is refused, and sooner or later takes it over from the other, as if that were gone.
    Tells which assignments it recorded, and what goes wrong.
    """
    try:
        with Store.open(url) as store:
            barrier.wait()
            for life in itertools.count():
                owner_id = f"{name} {life}"
                before = store.campaigns.get(campaign_id).owner
                gone = before.id if before else None
                with contextlib.suppress(OwnedError):
                    store.owners.release(campaign_id, gone or "nobody")
                    store.owners.begin_campaign(campaign_id)
                    store.owners.claim_campaign(campaign_id, owner_id, process(name))
                mine = store.as_owner(campaign_id, owner_id)
                with contextlib.suppress(NotOwnerError):
                    mine.assignments.release_leases(campaign_id)
                    if not _turns(mine, campaign_id, name, turns, results):
                        break
                time.sleep(random.random())
        results.put((name, None))
    except BaseException as error:
        results.put((name, repr(error)))
        raise


def _turns(mine, campaign_id, name, count, results):
    """Takes this number of turns of two assignments each; whether anything is left to do."""
    leases = []
    for _ in range(count):
        done = [(measurement(x.configuration, attempt_key=x.attempt_key), x.id) for x in leases]
        mine.measurements.record(done)
        for _, assignment_id in done:
            results.put((name, assignment_id))
        workers = f"{name} 1", f"{name} 2"
        leased = [mine.assignments.lease_next(campaign_id, DEVICE, worker) for worker in workers]
        leases = [lease for lease in leased if lease is not None]
        if not leases:
            return bool(mine.assignments.of_campaign(campaign_id, state="leased"))
    return True


def record_for_ever(url, acknowledged):
    """Records one measurement after the other, and tells each key once it is acknowledged."""
    with Store.open(url) as store:
        batch_size = 0
        while True:
            batch_size += 1
            result = measurement(configuration(batch_size))
            store.measurements.record_many([result])
            acknowledged.send(result.attempt_key)
