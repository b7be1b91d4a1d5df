"""A store with rows in every table and nothing wrong in it."""

from store_samples import (
    DEVICE,
    configuration,
    lease_next,
    measure_next,
    owned,
    planned,
    trace,
)

from trappm.profiler.measuring.canary import CanaryReading
from trappm.profiler.traced_step import Refusal, TraceKey
from trappm.store.schema import CampaignRow


def fill(store):
    """Rows in every table: labels, a censored one, a failure, a lease, its owner, a canary ..."""
    store.traces.put(TraceKey("resnet18", 64), trace())
    store.traces.put(TraceKey("odd", 64), Refusal("no graph"))
    some = [configuration(batch_size) for batch_size in (1, 2, 3, 4, 5)]
    held_out = configuration(architecture="vgg11")
    store.pools.save("tiny", some)
    campaign_id = store.campaigns.create("tiny", {"budget": 3}, 7).id
    store.campaigns.set_pool(campaign_id, [*((c, False) for c in some), (held_out, True)])
    store.rounds.plan(campaign_id, 0, "evaluation", DEVICE, planned([held_out], role="evaluate"))
    store.owners.begin_campaign(campaign_id)
    measure_next(store, campaign_id)
    store.rounds.close(campaign_id, 0, {"error": 0.5})
    store.rounds.plan(campaign_id, 1, "initial", DEVICE, planned(some[:4]))
    measure_next(store, campaign_id, power_w=50.0)
    measure_next(store, campaign_id, "oom", memory_detail_mib={"capacity": 4096.0})
    measure_next(store, campaign_id, "unsupported")
    lease_next(store, campaign_id)
    store.campaigns.log_event(campaign_id, "note", {"message": "hello"})
    store.canaries.save(canary_reading(some[0]), campaign_id=campaign_id)
    owned(store, campaign_id)
    with store.database.writing() as session:  # its owner lives for as long as any test takes
        session.get(CampaignRow, campaign_id).owner_seen_at = "2999-01-01T00:00:00+00:00"
    return campaign_id


def canary_reading(what=None):
    return CanaryReading(
        attempt_key="canary", taken_at="2026-01-02T03:04:05+00:00", host="here", device=DEVICE,
        stack_fingerprint="f", configuration=what or configuration(), protocol="quick",
        outcome="ok", step_time_ms=12.0, memory_mib=300.0, power_w=None, reference_ms=None,
        relative_drift=None, decision="ok", message=None,
    )  # fmt: skip
