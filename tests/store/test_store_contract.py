"""What the store promises, on every back end."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from sqlalchemy import create_engine, select
from store_samples import (
    DEVICE,
    ENVIRONMENT,
    campaign_with,
    configuration,
    measure_next,
    measurement,
    planned,
    states,
    step_profile,
    template,
)

from profiler.errors import CampaignError, InputError, SnapshotError, StoreError, TrappmError
from profiler.records import GraphTemplate, Precision
from store import LabelFilter
from store.schema import METADATA


def contents(url):
    """Every row of every table, to see whether anything changed; JSON without its order."""
    engine = create_engine(url)
    with engine.connect() as connection:
        rows = {
            table.name: sorted(
                str([json.dumps(x, sort_keys=True) if isinstance(x, dict) else x for x in row])
                for row in connection.execute(select(table))
            )
            for table in METADATA.sorted_tables
        }
    engine.dispose()
    return rows


# Campaigns, pools, rounds.


def test_a_campaign_is_kept_with_its_spec_and_the_latest_comes_first(store):
    first = store.create_campaign("one", {"pool": [1, 2], "at": None}, 2**31)
    second = store.create_campaign("two", {}, 1)
    assert store.campaign(first.id) == first
    assert (first.state, first.finished_at) == ("paused", None)
    assert first.spec == {"pool": [1, 2], "at": None}
    assert [c.id for c in store.campaigns()] == [second.id, first.id]
    assert store.campaign().id == second.id


def test_the_end_of_a_campaign_is_timed_and_forgotten_when_it_goes_on(store):
    campaign_id = store.create_campaign("one", {}, 0).id
    for state, ended in [("running", False), ("finished", True), ("running", False),
                         ("failed", False), ("cancelled", True)]:  # fmt: skip
        store.set_campaign_state(campaign_id, state)
        record = store.campaign(campaign_id)
        assert record.state == state
        assert (record.finished_at is not None) == ended


def test_a_campaign_that_is_not_there_is_said_so(store):
    with pytest.raises(InputError, match="no campaign yet"):
        store.campaign()
    known = store.create_campaign("one", {}, 0).id
    with pytest.raises(InputError, match=f"no campaign 'nope'; there are: {known}"):
        store.campaign("nope")
    with pytest.raises(CampaignError, match="nope"):
        store.set_campaign_state("nope", "running")
    with pytest.raises(StoreError):
        store.log_event("nope", "note", {})


def test_a_pool_is_set_once(store):
    campaign_id = store.create_campaign("one", {}, 0).id
    pool = [(configuration(2), True), (configuration(1, precision=Precision.AMP_BF16), False)]
    store.set_campaign_pool(campaign_id, pool)
    store.set_campaign_pool(campaign_id, pool)
    assert store.campaign_pool(campaign_id) == sorted(pool)
    with pytest.raises(CampaignError, match="2 configurations already"):
        store.set_campaign_pool(campaign_id, pool[:1])
    assert store.campaign_pool(campaign_id) == sorted(pool)


def test_two_campaigns_share_configurations_and_nothing_else(store):
    one, two = (campaign_with(store, [configuration(1), configuration(2)]) for _ in "ab")
    measure_next(store, one)
    assert [state for state, _, _ in states(store, one)] == ["done", "open"]
    assert [state for state, _, _ in states(store, two)] == ["open", "open"]
    assert store.campaign_labels(two) == []


def test_a_round_is_planned_once(store):
    campaign_id = campaign_with(store, [configuration(1), configuration(2)])
    before = store.assignments(campaign_id)
    store.plan_round(campaign_id, 0, "initial", planned([configuration(2)]))
    assert store.assignments(campaign_id) == before
    assert before[0].reason == {"score": 0.5}
    assert [r.purpose for r in store.rounds(campaign_id)] == ["initial"]


def test_each_device_has_its_part_of_a_round_planned_by_itself(store):
    campaign_id = campaign_with(store, [configuration(1), configuration(2)])
    for _ in "twice":
        other = planned([configuration(2)], device="a100")
        store.plan_round(campaign_id, 0, "initial", other)
    found = [(a.device, a.configuration.batch_size) for a in store.assignments(campaign_id)]
    assert sorted(found) == [("a100", 2), (DEVICE, 1), (DEVICE, 2)]
    (late,) = store.assignments(campaign_id, device="a100", round_number=0)
    assert late.state == "open"
    assert store.assignments(campaign_id, round_number=1) == []


def test_named_assignments_are_leased_together_or_not_at_all(store):
    campaign_id = campaign_with(store, [configuration(b) for b in (1, 2, 3)])
    first, second, third = store.assignments(campaign_id)
    wanted = [(third.id, "two"), (first.id, "one")]
    leases = store.lease_these(wanted, 60)
    assert [(a.id, a.worker, a.attempts) for a in leases] == [(i, w, 1) for i, w in wanted]
    assert store.lease_these(wanted, 60)[0].attempts == 1  # asked again, after an answer was lost
    for impossible in ((first.id, "other"), ("nothing", "other")):
        with pytest.raises(StoreError):
            store.lease_these([(second.id, "other"), impossible], 60)
    states = {a.id: a.state for a in store.assignments(campaign_id)}
    assert states == {first.id: "leased", second.id: "open", third.id: "leased"}
    store.record(measurement(configuration(3), attempt_key=leases[0].attempt_key),
                 assignment_id=third.id)  # fmt: skip
    with pytest.raises(StoreError, match="done"):
        store.lease_these([(third.id, "two")], 60)


@pytest.mark.parametrize(
    "wrong", [[configuration(1), configuration(99)], [configuration(3), configuration(1)]]
)
def test_a_round_that_cannot_be_is_not_planned_in_part(store, wrong):
    campaign_id = store.create_campaign("one", {}, 0).id
    store.set_campaign_pool(campaign_id, [(configuration(b), False) for b in (1, 2, 3)])
    store.plan_round(campaign_id, 0, "initial", planned([configuration(1)]))
    with pytest.raises(StoreError):  # one is not in the pool; one was planned before
        store.plan_round(campaign_id, 1, "acquired", planned(wrong))
    assert [r.number for r in store.rounds(campaign_id)] == [0]
    assert len(store.assignments(campaign_id)) == 1


def test_a_closed_round_keeps_its_first_report(store):
    campaign_id = campaign_with(store, [configuration()])
    store.close_round(campaign_id, 0, {"mape": 12.5, "power": None})
    store.close_round(campaign_id, 0, {"mape": 99})
    (record,) = store.rounds(campaign_id)
    assert (record.state, record.report) == ("closed", {"mape": 12.5, "power": None})
    with pytest.raises(CampaignError, match="no round 5"):
        store.close_round(campaign_id, 5, {})


def test_a_report_that_is_no_json_is_refused_and_the_round_stays_open(store):
    campaign_id = campaign_with(store, [configuration()])
    with pytest.raises(StoreError, match="JSON compliant"):
        store.close_round(campaign_id, 0, {"mape": math.nan})
    assert store.rounds(campaign_id)[0].state == "open"


def test_events_come_back_in_order(store):
    campaign_id = store.create_campaign("one", {}, 0).id
    store.log_event(campaign_id, "paused", {"message": "stopped"})
    store.log_event(campaign_id, "running", {})
    events = store.events(campaign_id)
    assert [(e.kind, e.message) for e in events] == [
        ("paused", {"message": "stopped"}), ("running", {}),
    ]  # fmt: skip
    assert events[0].at <= events[1].at


# Graphs.


def test_graphs_come_back_as_they_were_and_equal_ones_are_kept_once(store, database_url):
    data = template().to_bytes()
    store.save_graph("resnet18", 64, data, None)
    store.save_graph("resnet18.copy", 64, data, None)
    store.save_graph("vgg11", 32, None, "too small an input")
    pairs = [("resnet18", 64), ("vgg11", 32), ("resnet18", 96)]
    assert store.pairs_to_profile(pairs) == [("resnet18", 64), ("resnet18", 96)]
    assert store.graph_templates(pairs) == {("resnet18", 64): data}
    assert store.graph_for("resnet18", 64).content_hash == template().content_hash
    assert store.graph_for("vgg11", 32) is None
    assert [(r.architecture, r.input_size, r.reason) for r in store.refusals()] == [
        ("vgg11", 32, "too small an input")
    ]
    assert len(contents(database_url)["graphs"]) == 1


def test_a_later_graph_replaces_an_earlier_answer(store):
    store.save_graph("vgg11", 32, None, "crashed")
    store.save_graph("vgg11", 32, template(macs=1).to_bytes(), None)
    assert store.refusals() == []
    store.save_graph("vgg11", 32, template(macs=2).to_bytes(), None)
    found = GraphTemplate.from_bytes(store.graph_templates([("vgg11", 32)])["vgg11", 32])
    assert found.constant["macs"].tolist() == [2, 2]


def test_a_step_profile_or_its_refusal_is_kept_with_the_graph(store, database_url):
    pairs = [("resnet18", 64), ("resnet18", 96), ("vgg11", 64)]
    data = template().to_bytes()
    store.save_graph("resnet18", 64, data, None, step=step_profile())
    store.save_graph("resnet18", 96, data, None, step=step_profile(frozen=7))
    store.save_graph("vgg11", 64, data, None, step_refusal="its loss needs values")
    assert store.pairs_to_profile(pairs) == []
    assert store.step_profiles(pairs) == {
        ("resnet18", 64): step_profile(),
        ("resnet18", 96): step_profile(frozen=7),
    }
    assert store.step_profiles(pairs[1:]) == {("resnet18", 96): step_profile(frozen=7)}
    assert set(store.graph_templates(pairs)) == set(pairs)
    assert store.refusals() == []
    engine = create_engine(database_url)
    with engine.connect() as connection:
        table = METADATA.tables["step_profiles"]
        rows = connection.execute(select(table).order_by("architecture", "input_size"))
        assert [tuple(row[3:]) for row in rows] == [
            (4096, 5_000_000_000, 6_000_000_000, 0, None),
            (4096, 5_000_000_000, 6_000_000_000, 7, None),
            (None, None, None, None, "its loss needs values"),
        ]
    engine.dispose()


def test_a_later_static_profile_replaces_the_earlier_one_whole(store):
    pair = ("resnet18", 64)
    store.save_graph(*pair, template().to_bytes(), None, step_refusal="crashed")
    store.save_graph(*pair, template().to_bytes(), None, step=step_profile())
    assert store.step_profiles([pair]) == {pair: step_profile()}
    store.save_graph(*pair, None, "too small an input")
    assert store.step_profiles([pair]) == {}
    assert store.pairs_to_profile([pair]) == []
    store.save_graph(*pair, template().to_bytes(), None)
    assert store.pairs_to_profile([pair]) == [pair]


@pytest.mark.parametrize(
    "step",
    [
        {"step": b"not an archive"},
        {"step": step_profile()[:-40]},
        {"step": step_profile(), "step_refusal": "crashed"},
    ],
)
def test_a_step_profile_that_cannot_be_kept_takes_its_graph_with_it(store, step):
    with pytest.raises(TrappmError):
        store.save_graph("resnet18", 64, template().to_bytes(), None, **step)
    assert store.graph_templates([("resnet18", 64)]) == {}


# Leases.


def test_assignments_are_leased_in_the_order_wanted_and_only_once(store):
    wanted = [configuration(8), configuration(1), configuration(4)]
    campaign_id = campaign_with(store, wanted)
    leases = [store.lease(campaign_id, DEVICE, "w", 60) for _ in wanted]
    assert [lease.configuration for lease in leases] == wanted
    assert {(x.state, x.attempts, x.worker) for x in leases} == {("leased", 1, "w")}
    assert store.lease(campaign_id, DEVICE, "w", 60) is None
    assert store.lease(campaign_id, "a100", "w", 60) is None
    assert store.assignment_counts(campaign_id) == {DEVICE: {"leased": 3}}


def test_an_earlier_round_is_measured_first(store):
    campaign_id = store.create_campaign("one", {}, 0).id
    store.set_campaign_pool(campaign_id, [(configuration(b), False) for b in (1, 2)])
    store.plan_round(campaign_id, 1, "initial", planned([configuration(1)]))
    store.plan_round(campaign_id, 0, "evaluation", planned([configuration(2)], role="evaluate"))
    assert store.lease(campaign_id, DEVICE, "w", 60).round_number == 0
    assert store.lease(campaign_id, DEVICE, "w", 60).round_number == 1


def test_released_leases_do_not_count_as_failures(store):
    campaign_id = campaign_with(store, [configuration()])
    keys = set()
    for _ in range(5):
        keys.add(store.lease(campaign_id, DEVICE, "w", 60).attempt_key)
        assert store.release_leases(campaign_id) == 1
    assert len(keys) == 5
    assert states(store, campaign_id) == [("open", 5, 0)]
    assert store.release_leases(campaign_id) == 0


def test_an_expired_lease_is_given_to_another_and_counts_as_a_failure(store):
    campaign_id = campaign_with(store, [configuration()])
    lost = store.lease(campaign_id, DEVICE, "lost", 0)
    again = store.lease(campaign_id, DEVICE, "other", 60)
    assert again.id == lost.id
    assert (again.attempts, again.failures, again.worker) == (2, 1, "other")
    assert not store.heartbeat(lost, 60)
    assert "lost" in store.events(campaign_id)[0].message["message"]


def test_an_assignment_that_takes_every_worker_down_is_given_up(store):
    campaign_id = campaign_with(store, [configuration()])
    for _ in range(2):
        assert store.lease(campaign_id, DEVICE, "w", 0, max_attempts=2) is not None
    assert store.lease(campaign_id, DEVICE, "w", 60, max_attempts=2) is None
    assert states(store, campaign_id) == [("failed", 2, 2)]


@pytest.mark.parametrize("failure", ["outcome", "lost", "expired"])
def test_what_failed_waits_for_the_rest_of_its_round_but_keeps_its_place_for_readers(
    store, failure
):
    campaign_id = campaign_with(store, [configuration(b) for b in (1, 2, 4)])
    if failure == "outcome":
        measure_next(store, campaign_id, "unstable")
    else:
        lease = store.lease(campaign_id, DEVICE, "w", 0 if failure == "expired" else 60)
        if failure == "lost":
            store.give_up_lease(lease.id, "died")
    order = [store.lease(campaign_id, DEVICE, "w", 60).configuration.batch_size for _ in range(3)]
    assert order == [2, 4, 1]
    planned_order = [a.configuration.batch_size for a in store.assignments(campaign_id)]
    assert planned_order == [1, 2, 4]


def test_what_was_given_up_gets_another_chance_while_its_round_is_open(store):
    campaign_id = campaign_with(store, [configuration(1), configuration(2)])
    measure_next(store, campaign_id)
    for _ in range(3):
        measure_next(store, campaign_id, "error")
    assert store.reopen_failed(campaign_id) == 1
    assert states(store, campaign_id) == [("done", 1, 0), ("open", 3, 0)]
    _, recorded = measure_next(store, campaign_id)
    assert recorded.is_new
    assert store.reopen_failed(campaign_id) == 0


def test_what_was_given_up_in_a_closed_round_stays_so(store):
    campaign_id = campaign_with(store, [configuration()])
    for _ in range(3):
        measure_next(store, campaign_id, "error")
    store.close_round(campaign_id, 0, {})
    assert store.reopen_failed(campaign_id) == 0
    assert states(store, campaign_id) == [("failed", 3, 3)]


def test_a_heartbeat_keeps_a_lease(store):
    campaign_id = campaign_with(store, [configuration()])
    lease = store.lease(campaign_id, DEVICE, "w", 0)
    assert store.heartbeat(lease, 60)
    assert store.lease(campaign_id, DEVICE, "other", 60) is None
    assert not store.heartbeat(dataclasses.replace(lease, worker="other"), 60)
    assert not store.heartbeat(dataclasses.replace(lease, id="nope"), 60)


def test_a_heartbeat_keeps_no_lease_that_ended_even_if_the_same_worker_has_it_again(store):
    campaign_id = campaign_with(store, [configuration()])
    first = store.lease(campaign_id, DEVICE, "w", 60)
    store.give_up_lease(first.id, "silent")
    assert not store.heartbeat(first, 60)
    again = store.lease(campaign_id, DEVICE, "w", 0)
    assert (again.id, again.worker) == (first.id, first.worker)
    assert not store.heartbeat(first, 60)
    assert store.assignments(campaign_id)[0].lease_expires_at == again.lease_expires_at
    assert store.heartbeat(again, 60)
    store.record(measurement(attempt_key=again.attempt_key), assignment_id=again.id)
    assert not store.heartbeat(again, 60)


def test_a_lost_worker_gives_its_lease_back_with_the_reason(store):
    campaign_id = campaign_with(store, [configuration()])
    for failures in (1, 2, 3):
        lease = store.lease(campaign_id, DEVICE, "w", 60)
        store.give_up_lease(lease.id, f"died {failures}", max_attempts=3)
        store.give_up_lease(lease.id, "told twice", max_attempts=3)
    assert states(store, campaign_id) == [("failed", 3, 3)]
    assert store.lease(campaign_id, DEVICE, "w", 60) is None
    assert [e.message["message"] for e in store.events(campaign_id)] == [
        "died 1", "died 2", "died 3",
    ]  # fmt: skip


# Recording.


def test_a_measurement_comes_back_as_it_was(store):
    for given in (measurement(power_w=41.5, energy_j=0.5, missing={}), measurement(outcome="oom")):
        kept = store.measurement(store.record(given).measurement_id)
        assert kept == given
    with pytest.raises(InputError, match="no measurement has the id 99"):
        store.measurement(99)


def test_an_ok_measurement_makes_a_label(store):
    campaign_id = campaign_with(store, [configuration()], role="evaluate")
    given, recorded = measure_next(store, campaign_id)
    (label,) = store.campaign_labels(campaign_id)
    assert recorded.is_new
    assert (label.id, label.measurement_id) == (recorded.label_id, recorded.measurement_id)
    assert (label.step_time_ms, label.memory_mib, label.power_w) == (12.5, 321.5, None)
    assert (label.role, label.provenance, label.protocol) == ("evaluate", "measured", "quick")
    assert label.configuration == given.configuration
    assert store.labels() == [dataclasses.replace(label, role=None)]
    assert store.outcome_counts(campaign_id) == {DEVICE: {"ok": 1}}


def test_labels_of_a_campaign_come_as_planned_whatever_happened(store):
    sizes = [8, 1, 64, 4, 32, 2]
    campaign_id = campaign_with(store, [configuration(b) for b in sizes])
    measure_next(store, campaign_id, "unstable")
    for _ in sizes:
        measure_next(store, campaign_id)
    labels = store.campaign_labels(campaign_id)
    assert [label.configuration.batch_size for label in labels] == sizes
    assert [label.id for label in labels] != sorted(label.id for label in labels)
    assert store.campaign_labels(campaign_id, device=DEVICE, role="train") == labels
    assert store.campaign_labels(campaign_id, role="evaluate") == []
    assert store.campaign_labels(campaign_id, device="a100") == []


def test_recording_twice_changes_nothing(store, database_url):
    campaign_id = campaign_with(store, [configuration(1), configuration(2)])
    results = [measure_next(store, campaign_id, outcome) for outcome in ("error", "oom", "ok")]
    assert states(store, campaign_id) == [("done", 2, 1), ("done", 1, 0)]
    ids = {a.configuration: a.id for a in store.assignments(campaign_id)}
    before = contents(database_url)
    for given, recorded in results:
        again = store.record(given, assignment_id=ids[given.configuration])
        assert again == dataclasses.replace(recorded, is_new=False)
    assert contents(database_url) == before


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        ("ok", [("done", 1, 0)]),
        ("oom", [("done", 1, 0)]),
        ("unsupported", [("done", 1, 0)]),
        ("unstable", [("open", 1, 1), ("open", 2, 2), ("failed", 3, 3)]),
        ("error", [("open", 1, 1), ("open", 2, 2), ("failed", 3, 3)]),
        ("timeout", [("open", 1, 1), ("failed", 2, 2)]),
    ],
)
def test_an_outcome_settles_its_assignment(store, outcome, expected):
    campaign_id = campaign_with(store, [configuration()])
    for state in expected:
        measure_next(store, campaign_id, outcome)
        assert states(store, campaign_id) == [state]
    assert store.lease(campaign_id, DEVICE, "w", 60) is None
    assert store.outcome_counts(campaign_id) == {DEVICE: {outcome: len(expected)}}
    assert len(store.campaign_labels(campaign_id)) == (outcome == "ok")


def test_a_late_failure_is_kept_but_does_not_take_the_lease_from_another(store):
    campaign_id = campaign_with(store, [configuration()])
    late = store.lease(campaign_id, DEVICE, "late", 0)
    now = store.lease(campaign_id, DEVICE, "now", 60)
    store.record(measurement(outcome="error", attempt_key=late.attempt_key), assignment_id=late.id)
    assert states(store, campaign_id) == [("leased", 2, 1)]
    store.record(measurement(attempt_key=now.attempt_key), assignment_id=now.id)
    assert states(store, campaign_id) == [("done", 2, 1)]
    assert store.outcome_counts(campaign_id) == {DEVICE: {"error": 1, "ok": 1}}


def test_a_late_result_is_welcome(store):
    campaign_id = campaign_with(store, [configuration()])
    late = store.lease(campaign_id, DEVICE, "late", 0, max_attempts=1)
    assert store.lease(campaign_id, DEVICE, "other", 60, max_attempts=1) is None
    assert states(store, campaign_id) == [("failed", 1, 1)]
    store.record(measurement(attempt_key=late.attempt_key), assignment_id=late.id)
    assert states(store, campaign_id) == [("done", 1, 1)]
    assert len(store.campaign_labels(campaign_id)) == 1


def test_the_first_label_stays_and_another_stack_or_protocol_is_another_label(store):
    first = store.record(measurement(step_ms=10.0))
    assert store.record(measurement(step_ms=20.0)).label_id == first.label_id
    assert store.record(measurement(protocol="paper")).label_id != first.label_id
    other_stack = {**ENVIRONMENT, "torch": "2.14.0"}
    assert store.record(measurement(environment=other_stack)).label_id != first.label_id
    other_load = {**ENVIRONMENT, "load_average_before": 3.0, "host": "there"}
    assert store.record(measurement(environment=other_load)).label_id == first.label_id
    assert [x.step_time_ms for x in store.labels(LabelFilter())] == [10.0, 12.5, 12.5]


def test_a_measured_label_replaces_a_simulated_one_but_never_the_reverse(store):
    simulated = store.record(measurement(step_ms=1.0, provenance="simulated"))
    measured = store.record(measurement(step_ms=2.0))
    store.record(measurement(step_ms=3.0, provenance="simulated"))
    (label,) = store.labels()
    assert label.id == simulated.label_id == measured.label_id
    assert (label.step_time_ms, label.provenance) == (2.0, "measured")
    assert label.measurement_id == measured.measurement_id


@pytest.mark.parametrize("value", [0.0, -3.5, math.inf, math.nan])
def test_a_metric_that_cannot_be_is_kept_as_missing_with_the_reason(store, value):
    kept = store.measurement(store.record(measurement(memory_mib=value)).measurement_id)
    assert kept.memory_mib is None
    assert str(value) in kept.missing["memory_mib"]
    (label,) = store.labels()
    assert (label.step_time_ms, label.memory_mib) == (12.5, None)


def test_step_times_that_cannot_be_are_refused(store, database_url):
    before = contents(database_url)
    for step_ms in (0.0, -1.0, math.nan):
        with pytest.raises(StoreError, match="fault of the profiler"):
            store.record(measurement(step_ms=step_ms))
    assert contents(database_url) == before


def test_a_measurement_of_something_else_does_not_settle_an_assignment(store, database_url):
    campaign_id = campaign_with(store, [configuration(1)])
    lease = store.lease(campaign_id, DEVICE, "w", 60)
    before = contents(database_url)
    for wrong in (measurement(configuration(2)), measurement(device="a100")):
        with pytest.raises(StoreError, match="something else"):
            store.record(wrong, assignment_id=lease.id)
    with pytest.raises(StoreError, match="no assignment 'nope'"):
        store.record(measurement(), assignment_id="nope")
    assert contents(database_url) == before


# Labels of earlier campaigns.


def test_labels_of_an_earlier_campaign_are_adopted(store):
    one = campaign_with(store, [configuration(1), configuration(2)])
    measure_next(store, one)
    measure_next(store, one, "oom")
    fingerprint = store.labels()[0].fingerprint
    two = campaign_with(store, [configuration(2), configuration(1), configuration(4)])
    assert store.adopt_labels(two, DEVICE, fingerprint, "quick") == 1
    assert store.adopt_labels(two, DEVICE, fingerprint, "quick") == 0
    assert store.campaign_labels(two) == store.campaign_labels(one)
    assert [state for state, _, _ in states(store, two)] == ["open", "done", "open"]
    assert store.outcome_counts(two) == {}


@pytest.mark.parametrize(
    "other",
    [
        {"protocol": "paper"},
        {"device": "cpu-1t"},
        {"provenance": "simulated"},
        {"environment": {**ENVIRONMENT, "torch": "1"}},
    ],
)
def test_what_is_not_the_same_is_not_adopted(store, other):
    store.record(measurement(configuration(1), **other))
    store.record(measurement(configuration(9)))
    (usual,) = store.labels(LabelFilter(batch_size=9))
    campaign_id = campaign_with(store, [configuration(1)])
    assert store.adopt_labels(campaign_id, DEVICE, usual.fingerprint, "quick") == 0


# Snapshots.


def test_snapshots_are_found_by_id_and_by_alias(store):
    campaign_id = store.create_campaign("one", {}, 0).id
    for name in ("s1", "s2"):
        store.register_snapshot(
            name, campaign_id=campaign_id, location=f"folder-{name}", manifest={"heads": {}}
        )
    store.set_alias("latest", "s1")
    assert store.snapshot("latest").id == "s1"
    store.set_alias("latest", "s2")
    assert store.snapshot("latest") == store.snapshot("s2")
    assert store.snapshot("s2").location == "folder-s2"
    assert store.aliases() == {"latest": "s2"}
    assert [s.id for s in store.snapshots()] == ["s2", "s1"]
    assert store.snapshot("nope") is None


def test_a_snapshot_never_changes_and_names_never_clash(store):
    given = {"campaign_id": None, "location": "here", "manifest": {"a": 1}}
    store.register_snapshot("s1", **given)
    store.register_snapshot("s1", **given)
    with pytest.raises(SnapshotError, match="never changes"):
        store.register_snapshot("s1", **{**given, "manifest": {"a": 2}})
    with pytest.raises(SnapshotError, match="no snapshot 'nope'"):
        store.set_alias("latest", "nope")
    with pytest.raises(SnapshotError, match="can be no alias"):
        store.set_alias("s1", "s1")
    store.set_alias("latest", "s1")
    with pytest.raises(SnapshotError, match="is an alias"):
        store.register_snapshot("latest", **given)
    assert store.snapshot("s1").manifest == {"a": 1}
