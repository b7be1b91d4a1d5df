"""What the store promises of graphs and step profiles."""

from __future__ import annotations

import pytest
from sqlalchemy import create_engine, select
from store_samples import (
    contents,
    step_profile,
    template,
)

from trappm.profiler.errors import TrappmError
from trappm.profiler.records import GraphTemplate
from trappm.profiler.simulation.step_profile import TRACE_VERSION
from trappm.store.schema import METADATA


def test_graphs_come_back_as_they_were_and_equal_ones_are_kept_once(store, database_url):
    data = template().to_bytes()
    store.workloads.save_graph("resnet18", 64, data, None)
    store.workloads.save_graph("resnet18.copy", 64, data, None)
    store.workloads.save_graph("vgg11", 32, None, "too small an input")
    pairs = [("resnet18", 64), ("vgg11", 32), ("resnet18", 96)]
    assert store.workloads.pairs_to_profile(pairs) == [("resnet18", 64), ("resnet18", 96)]
    assert store.workloads.graph_templates(pairs) == {("resnet18", 64): data}
    pair = ("resnet18", 64)
    assert store.workloads.graph_templates([pair, ("vgg11", 32)]) == {pair: template().to_bytes()}
    assert [(r.architecture, r.input_size, r.reason) for r in store.workloads.refusals()] == [
        ("vgg11", 32, "too small an input")
    ]
    assert len(contents(database_url)["graphs"]) == 1


def test_a_later_graph_replaces_an_earlier_answer(store):
    store.workloads.save_graph("vgg11", 32, None, "crashed")
    store.workloads.save_graph("vgg11", 32, template(macs=1).to_bytes(), None)
    assert store.workloads.refusals() == []
    store.workloads.save_graph("vgg11", 32, template(macs=2).to_bytes(), None)
    graph = GraphTemplate.from_bytes(store.workloads.graph_templates([("vgg11", 32)])["vgg11", 32])
    assert graph.constant["macs"].tolist() == [2, 2]


def test_a_step_profile_or_its_refusal_is_kept_with_the_graph(store, database_url):
    pairs = [("resnet18", 64), ("resnet18", 96), ("vgg11", 64)]
    data = template().to_bytes()
    store.workloads.save_graph("resnet18", 64, data, None, step=step_profile())
    store.workloads.save_graph("resnet18", 96, data, None, step=step_profile(frozen=7))
    store.workloads.save_graph("vgg11", 64, data, None, step_refusal="its loss needs values")
    assert store.workloads.pairs_to_profile(pairs) == []
    assert store.workloads.step_profiles(pairs) == {
        ("resnet18", 64): step_profile(),
        ("resnet18", 96): step_profile(frozen=7),
    }
    assert store.workloads.step_profiles(pairs[1:]) == {("resnet18", 96): step_profile(frozen=7)}
    assert set(store.workloads.graph_templates(pairs)) == set(pairs)
    assert store.workloads.refusals() == []
    engine = create_engine(database_url)
    with engine.connect() as connection:
        table = METADATA.tables["step_profiles"]
        rows = connection.execute(select(table).order_by("architecture", "input_size"))
        assert [tuple(row[3:]) for row in rows] == [
            (4096, 5_000_000_000, 6_000_000_000, 0, None, TRACE_VERSION),
            (4096, 5_000_000_000, 6_000_000_000, 7, None, TRACE_VERSION),
            (None, None, None, None, "its loss needs values", TRACE_VERSION),
        ]
    engine.dispose()


def test_a_later_static_profile_replaces_the_earlier_one_whole(store):
    pair = ("resnet18", 64)
    store.workloads.save_graph(*pair, template().to_bytes(), None, step_refusal="crashed")
    store.workloads.save_graph(*pair, template().to_bytes(), None, step=step_profile())
    assert store.workloads.step_profiles([pair]) == {pair: step_profile()}
    store.workloads.save_graph(*pair, None, "too small an input")
    assert store.workloads.step_profiles([pair]) == {}
    assert store.workloads.pairs_to_profile([pair]) == []
    store.workloads.save_graph(*pair, template().to_bytes(), None)
    assert store.workloads.pairs_to_profile([pair]) == [pair]


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
        store.workloads.save_graph("resnet18", 64, template().to_bytes(), None, **step)
    assert store.workloads.graph_templates([("resnet18", 64)]) == {}
