"""Pools in the store."""

import pytest
from store_samples import configuration, graph_only, template, trace

from trappm.profiler.errors import InputError
from trappm.profiler.records import Precision
from trappm.profiler.traced_step import Refusal, TraceKey


def test_a_pool_is_replaced_when_saved_again(store):
    first = [configuration(batch) for batch in (1, 2, 4)]
    store.pools.save("small", [*first, first[0]])
    store.pools.save("other", first[:1])
    assert store.pools.get("small") == sorted(first)
    second = [first[2], configuration(8, precision=Precision.AMP_FP16)]
    store.pools.save("small", second)
    assert store.pools.get("small") == sorted(second)
    assert store.pools.get("other") == first[:1]


def test_parts_of_a_pool_report_the_state_of_each_step(store):
    names = ("resnet18", "resnet34", "vgg11", "vit_x")
    pool = [configuration(b, name) for b in (1, 2) for name in names]
    store.pools.save("small", [*pool, configuration(1, precision=Precision.AMP_FP16)])
    graph_hash = template().content_hash
    store.traces.put(TraceKey("resnet18", 64), trace())
    store.traces.put(TraceKey("resnet18", 96), trace())  # of no pool
    store.traces.put(TraceKey("resnet34", 64), graph_only("no loss"))
    store.traces.put(TraceKey("vit_x", 64), Refusal("too odd"))
    parts = store.pools.parts("small")
    assert [
        (p.key.model, str(p.key.settings.precision), p.family, p.configurations, p.state)
        for p in parts
    ] == [
        ("resnet18", "amp-fp16", "resnet", 1, None),
        ("resnet18", "fp32", "resnet", 2, (graph_hash, None)),
        ("resnet34", "fp32", "resnet", 2, (graph_hash, "no loss")),
        ("vgg11", "fp32", "vgg", 2, None),
        ("vit_x", "fp32", "vit", 2, (None, "too odd")),
    ]
    assert store.traces.missing([p.key for p in parts]) == [parts[0].key, parts[3].key]


def test_unknown_pools_are_reported(store):
    with pytest.raises(InputError, match="trappm pool build"):
        store.pools.get("small")
    store.pools.save("small", [configuration()])
    with pytest.raises(InputError, match="did you mean 'small'"):
        store.pools.parts("smal")
