"""Pools by name, on every back end."""

from __future__ import annotations

import pytest
from store_samples import configuration, step_profile, template

from trappm.profiler.errors import InputError
from trappm.profiler.records import Precision


def test_a_pool_is_exactly_what_was_saved_last(store):
    first = [configuration(batch) for batch in (1, 2, 4)]
    store.pools.save("small", {"groups": [1]}, [*first, first[0]])
    store.pools.save("other", {}, first[:1])
    assert store.pools.get("small") == sorted(first)
    second = [first[2], configuration(8, precision=Precision.AMP_FP16)]
    store.pools.save("small", {"groups": [2]}, second)
    assert store.pools.get("small") == sorted(second)
    assert store.pools.get("other") == first[:1]
    assert [(p.name, p.size) for p in store.pools.all()] == [("small", 2), ("other", 1)]
    assert store.pools.all()[0].spec == {"groups": [2]}


def test_parts_tell_graphs_and_refusals_and_what_is_still_to_do(store):
    names = ("resnet18", "resnet34", "resnet50", "vgg11", "vit_x")
    store.pools.save("small", {}, [configuration(b, name) for b in (1, 2) for name in names])
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


def test_a_pool_that_is_not_there_is_told(store):
    with pytest.raises(InputError, match="trappm pool build"):
        store.pools.get("small")
    store.pools.save("small", {}, [configuration()])
    with pytest.raises(InputError, match="did you mean 'small'"):
        store.pools.parts("smal")
