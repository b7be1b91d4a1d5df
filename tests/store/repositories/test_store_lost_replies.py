"""A commit whose reply is lost is repeated: the store and the answer are those of one commit."""

import inspect
import json
import re

import pytest
from sqlalchemy import create_engine, select
from store_samples import (
    DEVICE,
    campaign_with,
    configuration,
    lease_next,
    lost_reply,
    measure_next,
    measurement,
    planned,
    process,
    trace,
)
from store_whole import canary_reading

from trappm.profiler.traced_step import TraceKey
from trappm.store import Patience, Store
from trappm.store.records import Activity
from trappm.store.schema import METADATA


def recorded(store, campaign_id):
    """A result comes in."""
    lease = lease_next(store, campaign_id)
    result = measurement(lease.configuration, attempt_key=lease.attempt_key)
    return lambda: store.measurements.record([(result, lease.id)])


def leased(store, campaign_id):
    return lambda: store.assignments.lease_next(campaign_id, DEVICE, "w")


def failure_recorded(store, campaign_id):
    """A worker fails."""
    lease = lease_next(store, campaign_id)
    result = measurement(lease.configuration, "timeout", attempt_key=lease.attempt_key)
    return lambda: store.measurements.record([(result, lease.id)])


def claimed(store, campaign_id):
    store.owners.begin_campaign(campaign_id)
    store.owners.claim_campaign(campaign_id, "o", process())


def adopted(store, campaign_id):
    measure_next(store, campaign_id)
    fingerprint = store.labels.find()[0].fingerprint
    second = campaign_with(store, [configuration(b) for b in (1, 2, 4)])
    return lambda: store.assignments.adopt_labels(second, DEVICE, fingerprint, "quick")


def reopened(store, campaign_id):
    for _ in range(4):
        measure_next(store, campaign_id, "unsupported")
    store.owners.stop_campaign(campaign_id, "paused")
    return lambda: store.assignments.reopen(campaign_id, "unsupported")


def lost(store, campaign_id):
    lease = lease_next(store, campaign_id)
    return lambda: store.assignments.lose(lease.id, "it left")


def planned_anew(store, _):
    new = store.campaigns.create("new", {}, 3).id
    store.campaigns.set_pool(new, [(configuration(1), False)])
    return lambda: store.rounds.plan(new, 0, "initial", DEVICE, planned([configuration(1)]))


def running(store, campaign_id, what):
    claimed(store, campaign_id)
    lease_next(store, campaign_id)
    return what


MANY = [measurement(configuration(b), attempt_key=f"many {b}") for b in (7, 8)]
CASES = {
    "campaigns.create": lambda s, c: lambda: s.campaigns.create("new", {"budget": 1}, 3).name,
    "campaigns.set_pool": lambda s, c: (
        new := s.campaigns.create("new", {}, 3).id,
        lambda: s.campaigns.set_pool(new, [(configuration(9), False)]),
    )[1],
    "campaigns.log_event": lambda s, c: lambda: s.campaigns.log_event(c, "note", {"a": (1, 2)}),
    "rounds.plan": planned_anew,
    "rounds.close": lambda s, c: lambda: s.rounds.close(c, 0, {"error": 0.5}),
    "assignments.lose": lost,
    "owners.report": lambda s, c: lambda: s.owners.report(c, Activity(stage="steps", done=1)),
    "campaigns.start_or_continue": lambda s, c: (
        lambda: s.campaigns.start_or_continue("new", {"seed": 3}).name
    ),
    "assignments.release_leases": lambda s, c: (
        lease_next(s, c),
        lambda: s.assignments.release_leases(c),
    )[1],
    "assignments.reopen": reopened,
    "assignments.adopt_labels": adopted,
    "assignments.lease_next": leased,
    "measurements.record": recorded,
    "measurements.record of a failure": failure_recorded,
    "measurements._record_batch": lambda s, c: lambda: s.measurements.record_many(MANY),
    "canaries.save": lambda s, c: lambda: s.canaries.save(canary_reading(), campaign_id=c),
    "pools.save": lambda s, c: lambda: s.pools.save("p", [configuration(32)]),
    "traces.put": lambda s, c: lambda: s.traces.put(TraceKey("resnet18", 64), trace()),
    "traces._remove": lambda s, c: (
        s.traces.put(TraceKey("resnet18", 64), trace()),
        lambda: s.traces._remove(TraceKey("resnet18", 64).digest),
    )[1],
    "owners.begin_campaign": lambda s, c: lambda: s.owners.begin_campaign(c),
    "owners.claim_campaign": lambda s, c: (
        s.owners.begin_campaign(c),
        lambda: s.owners.claim_campaign(c, "o", process()),
    )[1],
    "owners.renew": lambda s, c: running(s, c, lambda: s.owners.renew(c, "o")),
    "owners.release": lambda s, c: running(s, c, lambda: s.owners.release(c, "o")),
    "owners.stop_campaign": lambda s, c: running(s, c, lambda: s.owners.stop_campaign(c, "paused")),
    "owners.stop_campaign for ever": lambda s, c: running(
        s, c, lambda: s.owners.stop_campaign(c, "cancelled")
    ),
    "owners.end_campaign": lambda s, c: running(
        s, c, lambda: s.owners.end_campaign(c, "failed", "no worker")
    ),
    "owners.finish_campaign": lambda s, c: running(
        s, c, lambda: s.owners.finish_campaign(c, "done", "s1")
    ),
}
"""Functions that prepare a store with a campaign and return the call to repeat, by method."""


def writing_methods(store):
    parts = {name: part for name, part in vars(store).items() if name != "database"}
    return {
        f"{name}.{method}"
        for name, part in parts.items()
        for method, function in inspect.getmembers(type(part), inspect.isfunction)
        if hasattr(function, "__wrapped__")
        and inspect.getsource(function.__wrapped__).lstrip().startswith("@writing")
    }


@pytest.mark.parametrize("databases", ["sqlite"], indirect=True)
def test_every_writing_method_has_a_case(store):
    assert writing_methods(store) == {name.split(" ")[0] for name in CASES}


def what_it_leaves(databases, folder, case, lost):
    """The answer, and every row; ids and times of this run are numbered as they come."""
    folder.mkdir()
    with databases.copy(folder, _nothing) as url:
        pauses = []
        patience = Patience(tell=lambda line: None, sleep=pauses.append)
        with Store.open(url, patience) as store:
            campaign_id = campaign_with(store, [configuration(b) for b in (1, 2, 4, 8)])
            call = CASES[case](store, campaign_id)
            if lost:
                with lost_reply(store):
                    answer = call()
            else:
                answer = call()
        assert len(pauses) == lost
        engine = create_engine(url)
        with engine.connect() as connection:
            rows = {
                table.name: sorted(
                    (_plain(row) for row in connection.execute(select(table))), key=_without_ids
                )
                for table in METADATA.sorted_tables
            }
        engine.dispose()
    names = {}

    def numbered(match):
        return names.setdefault(match[0], f"<{len(names)}>")

    return re.sub(MADE_UP, numbered, f"{answer}\n{json.dumps(rows, indent=1)}")


MADE_UP = r"\b[0-9a-f]{32}\b|\b[0-9a-f]{8}\b|\b20(?!26-01)\d\d-\d\d-\d\d[T ][\d:.]+(\+00:00)?"


def _nothing(_store):
    pass


def _plain(row):
    return [
        json.dumps(value, sort_keys=True) if isinstance(value, dict) else str(value)
        for value in row
    ]


def _without_ids(row):
    return re.sub(MADE_UP, "", str(row))


ON_POSTGRESQL = ("assignments.lease_next", "measurements.record", "owners.claim_campaign")


@pytest.mark.parametrize(
    ("databases", "case"),
    [*(("sqlite", case) for case in CASES), *(("postgresql", case) for case in ON_POSTGRESQL)],
    indirect=["databases"],
)
def test_repeating_a_call_after_a_lost_reply_changes_nothing(databases, tmp_path, case):
    once = what_it_leaves(databases, tmp_path / "once", case, lost=False)
    assert what_it_leaves(databases, tmp_path / "twice", case, lost=True) == once
