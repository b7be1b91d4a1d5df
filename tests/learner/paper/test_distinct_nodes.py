"""Computing each distinct node once gives what PyG's layers give on every node."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.nn import global_add_pool

from trappm.learner.paper.distinct_nodes import MAX_DEPTH, classes_of, node_keys
from trappm.learner.paper.encoder import EncoderNetwork
from trappm.learner.paper.graphs import batches, to_data
from trappm.learner.paper.regressor import HeadNetwork


def plain_keys(features, edges):
    """The same by definition: nested tuples of a node and its predecessors."""
    predecessors = [edges[edges[:, 1] == node, 0] for node in range(len(features))]
    keys = [tuple(row) for row in features.tolist()]
    actual = [keys]
    for _ in range(MAX_DEPTH):
        keys = [
            (own, tuple(sorted(keys[p] for p in before)))
            for own, before in zip(keys, predecessors, strict=True)
        ]
        numbers = {key: i for i, key in enumerate(sorted(set(keys), key=str))}
        keys = [numbers[key] for key in keys]
        actual.append(keys)
    return actual


def partition(keys):
    """Return the partition of the nodes by key."""
    first = {}
    return [first.setdefault(key, i) for i, key in enumerate(keys)]


@given(
    features=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=12),
    data=st.data(),
)
@settings(deadline=None)
def test_keys_differ_exactly_where_neighborhoods_differ(features, data):
    count = len(features)
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    chosen = data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    rows = np.array(features, dtype=np.float32)
    edges = np.array(chosen, dtype=np.int64).reshape(-1, 2)
    actual = node_keys(rows, edges)
    for depth, expected in enumerate(plain_keys(rows, edges)):
        assert partition(actual[:, depth].tolist()) == partition(expected)


@pytest.mark.parametrize("training", [True, False])
def test_the_encoder_over_distinct_nodes_equals_pyg(zoo, training):
    batch = next(
        batches([to_data(graph, zoo.encoder.scaler) for graph in zoo.graphs[:20]], 10**9, range(20))
    )
    preset = replace(zoo.encoder.preset, dropout=0.0)
    ours, plain = (
        EncoderNetwork(replace(preset, distinct=d)).train(training) for d in (True, False)
    )
    plain.load_state_dict(ours.state_dict())
    z, expected = ours.nodes(batch), plain.nodes(batch)
    assert len(classes_of(batch, 4).layers[-1].roots) < len(expected) / 2
    torch.testing.assert_close(z, expected, rtol=1e-4, atol=1e-5)
    for nodes in (z, expected):
        global_add_pool(nodes, batch.batch).square().mean().backward()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-2, atol=1e-3)
    for a, b in zip(ours.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_regressor_over_distinct_nodes_equals_pyg(zoo, small):
    data = [to_data(g, zoo.encoder.scaler, vector=np.ones(3)) for g in zoo.graphs[:20]]
    batch = next(batches(data, 10**9, range(20)))
    ours, plain = (HeadNetwork(replace(small.head, distinct=d), 3, 50.0) for d in (True, False))
    torch.nn.init.ones_(ours.output.weight)
    plain.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(batch), plain(batch), rtol=1e-4, atol=1e-5)


def test_networks_deeper_than_the_keys_are_refused(zoo):
    batch = next(batches([to_data(zoo.graphs[0], zoo.encoder.scaler)], 10**9, [0]))
    with pytest.raises(ValueError, match="reach to depth"):
        classes_of(batch, MAX_DEPTH + 1)
