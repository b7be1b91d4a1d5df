"""Asking for labels and attempts, on every back end."""

import itertools

import pytest
from store_samples import campaign_with, configuration, contents, measure_next, measurement

from trappm.profiler.errors import InputError
from trappm.profiler.records import Precision
from trappm.store import LabelFilter


@pytest.fixture
def filled_store(store):
    """A store with labels of two devices and three architectures, and two failures."""
    for what, fields in [
        (configuration(1, "resnet18"), {"step_ms": 5.0}),
        (configuration(2, "resnet18"), {"step_ms": 4.0, "power_w": 40.0}),
        (configuration(1, "resnet50"), {"device": "a100", "protocol": "paper"}),
        (configuration(1, "vgg11_bn", precision=Precision.AMP_FP16), {"provenance": "imported"}),
        (configuration(1, "odd%name"), {}),
    ]:
        store.measurements.record_many([measurement(what, **fields)])
    store.measurements.record_many([measurement(configuration(64, "resnet18"), "oom")])
    store.measurements.record_many([measurement(configuration(1, "resnet18"), "unstable")])
    return store


FILTERS = [
    ({}, 5),
    ({"architecture": "resnet18"}, 2),
    ({"architecture": "resnet*"}, 3),
    ({"architecture": "*%*"}, 1),
    ({"architecture": "resnet[13]?"}, 2),
    ({"family": "resnet"}, 3),
    ({"family": "resnet", "device": "a100"}, 1),
    ({"batch_size": 2}, 1),
    ({"precision": "amp-fp16"}, 1),
    ({"metric": "power_w"}, 1),
    ({"provenance": "imported"}, 1),
    ({"since": "1h"}, 5),
    ({"until": "1h"}, 0),
    ({"outcome": "oom"}, 1),
    ({"outcome": "any"}, 7),
    ({"outcome": "any", "since": "2026-01-02", "until": "2026-01-02"}, 7),
    ({"outcome": "any", "since": "2026-01-02T04:04:05.7+01:00"}, 0),
    ({"outcome": "any", "until": "2026-01-01"}, 0),
    ({"where": "step_time_ms <= 5"}, 2),
    ({"where": "step_time_ms <= 5 and batch_size > 1.5 AND power_w == 4e1"}, 1),
    ({"where": "architecture = 'odd%name'", "device": "cpu-2t"}, 1),
    ({"where": "device != a100 and provenance=measured"}, 3),
    ({"where": "created_at > 2026-01-02 and id < 1e30"}, 5),
    ({"where": "started_at != 2026-01-02", "outcome": "any"}, 0),
    ({"where": "outcome = oom and started_at <= 2026-01-02", "outcome": "any"}, 1),
    ({"where": "started_at < 2026-01-02", "outcome": "any"}, 0),
    ({"where": "started_at > 2026-01-02", "outcome": "any"}, 0),
    ({"where": "started_at >= 2026-01-02", "outcome": "any"}, 7),
]


def test_filters_restrict_labels(filled_store):
    for wanted, count in FILTERS:
        frame = filled_store.labels.query(LabelFilter(**wanted))
        assert len(frame) == count, wanted
        assert {"architecture", "device", "step_time_ms", "memory_mib"} <= set(frame.columns)
        if "outcome" not in wanted:
            assert len(filled_store.labels.find(LabelFilter(**wanted))) == count, wanted
    with pytest.raises(InputError, match="labels have no outcome"):
        filled_store.labels.find(LabelFilter(outcome="oom"))


def test_labels_are_filtered_by_campaign(filled_store):
    campaign_id = campaign_with(filled_store, [configuration(1), configuration(32)])
    measure_next(filled_store, campaign_id)
    measure_next(filled_store, campaign_id, "error")
    assert filled_store.labels.query(LabelFilter(campaign=campaign_id)).batch_size.tolist() == [1]
    wanted = LabelFilter(campaign=campaign_id, outcome="error")
    assert filled_store.labels.query(wanted).message.tolist() == ["ended as error"]


def test_rows_are_sorted_with_missing_values_last_and_have_the_requested_columns(filled_store):
    query = filled_store.labels.query
    fastest = query(LabelFilter(), sort="step_time_ms", limit=2)
    assert fastest.step_time_ms.tolist() == [4.0, 5.0]
    by_power = query(LabelFilter(), sort="-power_w")
    assert by_power.power_w.iloc[0] == 40.0
    assert by_power.power_w.iloc[1:].isna().all()
    assert by_power.memory_mib.dtype == "float64"
    wanted = LabelFilter(architecture="resnet18")
    frame = query(wanted, columns=["power_w", "batch_size"], sort="-batch_size")
    assert list(frame.columns) == ["power_w", "batch_size"]
    assert frame.batch_size.tolist() == [2, 1]
    for wrong, reason in (
        ({"sort": "speed"}, "cannot sort by 'speed'"),
        ({"columns": ["prize"]}, "cannot show 'prize'"),
        ({"where": "outcome = oom"}, "cannot compare 'outcome'"),
        ({"where": "power_w > much"}, "cannot compare power_w with 'much'; give a number"),
        ({"where": "device > a"}, "cannot compare device by >, because it is text"),
    ):
        where = wrong.pop("where", None)
        with pytest.raises(InputError, match=reason):
            query(LabelFilter(where=where), **wrong)
    names = filled_store.labels.names()
    assert names["device"] == ["a100", "cpu-2t"]
    assert names["family"] == ["odd", "resnet", "vgg"]
    assert names["architecture"] == ["odd%name", "resnet18", "resnet50", "vgg11_bn"]


def test_pages_are_consecutive_and_counted(filled_store):
    wanted = LabelFilter(outcome="any")
    whole = filled_store.labels.query(wanted, sort="-step_time_ms")["id"].tolist()
    pages = [
        filled_store.labels.query(wanted, sort="-step_time_ms", limit=3, offset=at)["id"].tolist()
        for at in (0, 3, 6, 9)
    ]
    assert [len(page) for page in pages] == [3, 3, 1, 0]
    assert sum(pages, []) == whole  # noqa: RUF017  (four of them)
    assert filled_store.labels.count(wanted, at_most=100) == len(whole)
    assert filled_store.labels.count(wanted, at_most=5) == 5
    assert filled_store.labels.count(LabelFilter(family="resnet"), at_most=100) == 3


def test_invalid_filters_are_refused():
    for wrong, reason in (
        ({"metric": "x"}, "metric is 'x'; it must be one of"),
        ({"phase": "x"}, "phase is 'x'; it must be one of"),
        ({"batch_size": 0}, "batch_size is 0; it must be from 1 to 2,147,483,647"),
        ({"input_size": 2**31}, "input_size is 2147483648; it must be from 1"),
        ({"since": "yesterday"}, "is no time; give an ISO date such as"),
        ({"until": "999999w"}, "is no time; give an ISO date such as"),
        ({"where": "a = 1 or b = 2"}, "write comparisons"),
        ({"where": "a = 1" * 999}, "write comparisons"),
    ):
        with pytest.raises(InputError, match=reason):
            LabelFilter(**wrong)


UNKNOWN = [
    ({"device": "a10"}, "no device 'a10'; did you mean 'a100'?"),
    ({"architecture": "resnet81"}, "no architecture 'resnet81'; did you mean 'resnet18'"),
    ({"campaign": "nope"}, "no campaign 'nope'; there are none yet"),
    ({"where": "batch_size = 1 and device = a10"}, "no device 'a10'; did you mean 'a100'?"),
]


def test_unknown_names_are_reported_with_the_nearest(filled_store):
    for wanted, reason in UNKNOWN:
        with pytest.raises(InputError) as caught:
            filled_store.labels.query(LabelFilter(**wanted))
        assert reason in str(caught.value)


HOSTILE = [
    "'; DROP TABLE labels; --",
    "resnet%",
    "x' OR '1'='1",
    "*'; DELETE FROM labels; --",
    "*%",
    "resnet18\x1b",
]


def test_hostile_text_matches_and_changes_nothing(filled_store, database_url):
    before = contents(database_url)
    names = ["architecture", "family", "device", "campaign"]
    query = filled_store.labels.query
    for name, hostile in itertools.product(names, HOSTILE):
        assert filled_store.labels.find(LabelFilter(**{name: hostile})) == [], hostile
        with pytest.raises(InputError):
            query(LabelFilter(**{name: hostile}))
    for hostile in HOSTILE:
        for settings in ({"sort": hostile}, {"columns": [hostile]}):
            with pytest.raises(InputError):
                query(LabelFilter(), **settings)
        with pytest.raises(InputError):
            query(LabelFilter(where=hostile))
    assert contents(database_url) == before
