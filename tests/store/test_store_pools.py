"""Pools by name, on every back end."""

from __future__ import annotations

import pytest
from store_samples import configuration, template

from profiler.errors import InputError
from profiler.records import Precision


def test_a_pool_is_exactly_what_was_saved_last(store):
    first = [configuration(batch) for batch in (1, 2, 4)]
    store.save_pool("small", {"groups": [1]}, [*first, first[0]])
    store.save_pool("other", {}, first[:1])
    assert store.pool("small") == sorted(first)
    second = [first[2], configuration(8, precision=Precision.AMP_FP16)]
    store.save_pool("small", {"groups": [2]}, second)
    assert store.pool("small") == sorted(second)
    assert store.pool("other") == first[:1]
    assert [(p.name, p.size) for p in store.pools()] == [("small", 2), ("other", 1)]
    assert store.pools()[0].spec == {"groups": [2]}


def test_parts_tell_graphs_and_refusals_and_what_is_still_to_do(store):
    pool = [configuration(b, name) for b in (1, 2) for name in ("resnet18", "vgg11", "vit_x")]
    store.save_pool("small", {}, pool)
    graph = template()
    store.save_graph("resnet18", 64, graph.to_bytes(), None)
    store.save_graph("resnet18", 96, graph.to_bytes(), None)  # of no pool
    store.save_graph("vit_x", 64, None, "too odd")
    parts = [
        (p.family, p.configurations, p.graph_hash, p.refusal) for p in store.pool_parts("small")
    ]
    assert parts == [
        ("resnet", 2, graph.content_hash, None),
        ("vgg", 2, None, None),
        ("vit", 2, None, "too odd"),
    ]  # fmt: skip


def test_a_pool_that_is_not_there_is_told(store):
    with pytest.raises(InputError, match="trappm pool build"):
        store.pool("small")
    store.save_pool("small", {}, [configuration()])
    with pytest.raises(InputError, match="did you mean 'small'"):
        store.pool_parts("smal")
