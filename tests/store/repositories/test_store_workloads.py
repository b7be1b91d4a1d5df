"""Graphs, step profiles and pools in the store."""

import pytest
from store_samples import configuration, contents, step_profile, template

from trappm.profiler.errors import InputError, TrappmError
from trappm.profiler.records import Precision


def test_graphs_are_read_unchanged_and_stored_once(store, database_url):
    data = template().to_bytes()
    store.workloads.save_graph("resnet18", 64, data, None)
    store.workloads.save_graph("resnet18.copy", 64, data, None)
    store.workloads.save_graph("vgg11", 32, None, "too small an input")
    pairs = [("resnet18", 64), ("vgg11", 32), ("resnet18", 96)]
    assert store.workloads.pairs_to_profile(pairs) == [("resnet18", 64), ("resnet18", 96)]
    assert store.workloads.graph_templates(pairs) == {("resnet18", 64): data}
    pair = ("resnet18", 64)
    assert store.workloads.graph_templates([pair, ("vgg11", 32)]) == {pair: template().to_bytes()}
    assert store.workloads.refusals() == {("vgg11", 32): "too small an input"}
    assert len(contents(database_url)["graphs"]) == 1


def test_step_profiles_and_refusals_are_stored_with_the_graph(store):
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
    assert store.workloads.refusals() == {}


def test_a_later_static_profile_replaces_the_earlier_one(store):
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
def test_an_invalid_step_profile_also_rejects_its_graph(store, step):
    with pytest.raises(TrappmError):
        store.workloads.save_graph("resnet18", 64, template().to_bytes(), None, **step)
    assert store.workloads.graph_templates([("resnet18", 64)]) == {}


def test_a_pool_is_replaced_when_saved_again(store):
    first = [configuration(batch) for batch in (1, 2, 4)]
    store.pools.save("small", [*first, first[0]])
    store.pools.save("other", first[:1])
    assert store.pools.get("small") == sorted(first)
    second = [first[2], configuration(8, precision=Precision.AMP_FP16)]
    store.pools.save("small", second)
    assert store.pools.get("small") == sorted(second)
    assert store.pools.get("other") == first[:1]


def test_parts_of_a_pool_report_what_is_profiled(store):
    names = ("resnet18", "resnet34", "resnet50", "vgg11", "vit_x")
    store.pools.save("small", [configuration(b, name) for b in (1, 2) for name in names])
    graph = template()
    store.workloads.save_graph("resnet18", 64, graph.to_bytes(), None, step=step_profile())
    store.workloads.save_graph(
        "resnet18", 96, graph.to_bytes(), None, step=step_profile()
    )  # of no pool
    store.workloads.save_graph("resnet34", 64, graph.to_bytes(), None, step_refusal="no loss")
    store.workloads.save_graph("resnet50", 64, graph.to_bytes(), None)
    store.workloads.save_graph("vit_x", 64, None, "too odd")
    parts = store.pools.parts("small")
    assert [(p.architecture, p.family, p.input_size, p.configurations) for p in parts] == [
        (name, family, 64, 2)
        for name, family in zip(names, ("resnet",) * 3 + ("vgg", "vit"), strict=True)
    ]
    assert [
        (p.graph_hash, p.refusal, p.has_step_profile, p.step_refusal, p.is_profiled) for p in parts
    ] == [
        (graph.content_hash, None, True, None, True),
        (graph.content_hash, None, False, "no loss", True),
        (graph.content_hash, None, False, None, False),
        (None, None, False, None, False),
        (None, "too odd", False, None, True),
    ]  # fmt: skip
    to_do = [(p.architecture, 64) for p in parts if not p.is_profiled]
    assert store.workloads.pairs_to_profile([(name, 64) for name in names]) == to_do


def test_unknown_pools_are_reported(store):
    with pytest.raises(InputError, match="trappm pool build"):
        store.pools.get("small")
    store.pools.save("small", [configuration()])
    with pytest.raises(InputError, match="did you mean 'small'"):
        store.pools.parts("smal")
