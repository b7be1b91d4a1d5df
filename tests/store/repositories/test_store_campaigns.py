"""What the store promises of campaigns, rounds, labels that they take over, and snapshots."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
from store_samples import (
    DEVICE,
    ENVIRONMENT,
    campaign_with,
    configuration,
    lease_next,
    measure_next,
    measurement,
    planned,
    states,
)

from trappm.profiler.errors import CampaignError, StoreError
from trappm.profiler.records import Optimizer, Precision
from trappm.store import LabelFilter
from trappm.store.records import MAX_LOSSES


def test_campaigns_keep_their_spec_and_the_latest_comes_first(store):
    first = store.campaigns.create("one", {"pool": [1, 2], "at": None}, 2**31)
    second = store.campaigns.create("two", {}, 1)
    assert store.campaigns.get(first.id) == first
    assert (first.state, first.finished_at) == ("paused", None)
    assert first.spec == {"pool": [1, 2], "at": None}
    assert [c.id for c in store.campaigns.all()] == [second.id, first.id]
    assert store.campaigns.get().id == second.id


def test_a_pool_cannot_be_changed(store):
    campaign_id = store.campaigns.create("one", {}, 0).id
    pool = [(configuration(2), True), (configuration(1, precision=Precision.AMP_BF16), False)]
    store.campaigns.set_pool(campaign_id, pool)
    store.campaigns.set_pool(campaign_id, pool)
    assert store.campaigns.pool(campaign_id) == sorted(pool)
    with pytest.raises(CampaignError, match="2 configurations already"):
        store.campaigns.set_pool(campaign_id, pool[:1])
    assert store.campaigns.pool(campaign_id) == sorted(pool)


def test_rounds_are_planned_once_per_device(store):
    campaign_id = campaign_with(store, [configuration(1), configuration(2)])
    for _ in "twice":
        other = planned([configuration(2)], device="a100")
        store.rounds.plan(campaign_id, 0, "initial", "a100", other)
    assert store.rounds.all(campaign_id)[0].planned == {DEVICE: 2, "a100": 1}
    assignments = [
        (a.device, a.configuration.batch_size) for a in store.assignments.of_campaign(campaign_id)
    ]
    assert sorted(assignments) == [("a100", 2), (DEVICE, 1), (DEVICE, 2)]
    (late,) = store.assignments.of_campaign(campaign_id, device="a100", round_number=0)
    assert late.state == "open"
    assert store.assignments.of_campaign(campaign_id, round_number=1) == []


def test_what_failed_is_due_a_round_later_and_on_another_host_first(store):
    campaign_id = campaign_with(store, [configuration(b) for b in (1, 2)])
    both = {"hosts": {"a", "b"}}

    def lease(host, before=1):
        return store.assignments.lease_next(
            campaign_id, DEVICE, f"on {host}", host=host, **both, before=before
        )

    first = lease("a")
    failed = measurement(first.configuration, "error", attempt_key=first.attempt_key)
    assert store.measurements.record([(failed, first.id)])[first.id].failures == 1
    second = lease("a")
    assert second.configuration != first.configuration
    assert lease("b") is None  # it is due in round 1
    (part,) = store.campaigns.standing(campaign_id).pending[1:]
    assert (part.due, part.waiting, part.leased) == (1, 1, 0)
    done = measurement(second.configuration, attempt_key=second.attempt_key)
    store.measurements.record([(done, second.id)])
    assert lease("a", before=2) is None  # it failed there
    assert lease("b", before=None).id == first.id


def test_a_loss_is_no_failure(store):
    campaign_id = campaign_with(store, [configuration()])
    for count in range(1, MAX_LOSSES + 1):
        lease = store.assignments.lease_next(campaign_id, DEVICE, "w")
        after = store.assignments.lose(lease.id, "its node is gone")
        assert store.assignments.lose(lease.id, "its node is gone") == after
        assert (after.losses, after.failures) == (count, 0)
        assert after.state == ("failed" if count == MAX_LOSSES else "open")
    assert store.assignments.lease_next(campaign_id, DEVICE, "w") is None
    (loss,) = store.assignments.losses(campaign_id)
    assert (loss.outcome, loss.count) == (None, 1)
    store.owners.stop_campaign(campaign_id, "paused")
    assert store.assignments.reopen(campaign_id, None) == 1
    assert states(store, campaign_id) == [("open", MAX_LOSSES, 0)]


def test_a_stopped_campaign_leases_nothing_again(store):
    """What the order to stop has released is still being measured."""
    campaign_id = campaign_with(store, [configuration(1), configuration(2)])
    assert lease_next(store, campaign_id, "first") is not None
    store.owners.stop_campaign(campaign_id, "paused")
    assert lease_next(store, campaign_id, "second") is None
    store.owners.begin_campaign(campaign_id)
    assert lease_next(store, campaign_id, "second") is not None


def test_two_launches_of_one_file_make_one_campaign(store):
    """Also at one moment, as the second waits for the transaction of the first."""
    spec = {"seed": 7, "budget": 3}
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda _: store.campaigns.start_or_continue("a", spec), range(8)))
    assert len({campaign.id for campaign in made}) == len(store.campaigns.all()) == 1
    other = store.campaigns.start_or_continue("a", spec | {"budget": 4})
    assert (other.seed, other.spec["seed"]) == (8, 8)  # it does not repeat the first
    assert store.campaigns.start_or_continue("b", spec, may_create=False) is None


def test_an_invalid_round_is_not_planned_in_part(store):
    campaign_id = store.campaigns.create("one", {}, 0).id
    store.campaigns.set_pool(campaign_id, [(configuration(b), False) for b in (1, 2, 3)])
    store.rounds.plan(campaign_id, 0, "initial", DEVICE, planned([configuration(1)]))
    for wrong in (99, 1):  # not in the pool; planned before
        choice = planned([configuration(3), configuration(wrong)])
        with pytest.raises(StoreError):
            store.rounds.plan(campaign_id, 1, "acquired", DEVICE, choice)
    assert [r.number for r in store.rounds.all(campaign_id)] == [0]
    assert len(store.assignments.of_campaign(campaign_id)) == 1


def test_a_closed_round_keeps_its_first_report(store):
    campaign_id = campaign_with(store, [configuration()])
    with pytest.raises(StoreError, match="JSON compliant"):
        store.rounds.close(campaign_id, 0, {"mape": math.nan})
    assert not store.rounds.all(campaign_id)[0].is_closed
    store.rounds.close(campaign_id, 0, {"mape": 12.5, "power": None})
    store.rounds.close(campaign_id, 0, {"mape": 99})
    (record,) = store.rounds.all(campaign_id)
    assert (record.is_closed, record.report) == (True, {"mape": 12.5, "power": None})


def test_labels_of_an_earlier_campaign_are_adopted(store):
    first = campaign_with(store, [configuration(1), configuration(2)])
    measure_next(store, first)
    measure_next(store, first, "oom")
    fingerprint = store.labels.find()[0].fingerprint
    second = campaign_with(store, [configuration(2), configuration(1), configuration(4)])
    for _ in range(2):
        store.assignments.adopt_labels(second, DEVICE, fingerprint, "quick")
    assert store.labels.of_campaign(second) == store.labels.of_campaign(first)
    assert [state for state, _, _ in states(store, second)] == ["open", "done", "open"]
    assert store.campaigns.outcome_counts(second) == {}
    assert store.campaigns.standing(first).measured == {DEVICE: 2}
    assert store.campaigns.standing(second).measured == {}


def test_labels_of_other_conditions_are_not_adopted(store):
    for other in (
        {"protocol": "paper"},
        {"device": "cpu-1t"},
        {"provenance": "simulated"},
        {"environment": {**ENVIRONMENT, "torch": "1"}},
    ):
        store.measurements.record_many([measurement(configuration(1), **other)])
    store.measurements.record_many([measurement(configuration(9))])
    (usual,) = store.labels.find(LabelFilter(batch_size=9))
    campaign_id = campaign_with(store, [configuration(1)])
    store.assignments.adopt_labels(campaign_id, DEVICE, usual.fingerprint, "quick")
    assert states(store, campaign_id) == [("open", 0, 0)]


def test_labels_of_pairs_have_their_architecture_size_and_settings(store):
    asked = configuration(2)
    others = [
        configuration(3), configuration(2, input_size=96), configuration(2, architecture="vgg11"),
        configuration(2, optimizer=Optimizer.ADAM),
    ]  # fmt: skip
    store.measurements.record_many([measurement(what) for what in (asked, *others)])
    pairs = [(asked.architecture, asked.input_size), ("vgg11", 96)]
    (label,) = store.labels.of_pairs(pairs, asked, DEVICE)
    assert label.configuration == asked
    assert store.labels.of_pairs(pairs, asked, "cpu-9t") == []
