"""Computing each distinct node once gives what PyG's layers give on every node."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch_geometric.nn import SAGEConv, global_add_pool

from trappm.learner.paper.distinct_nodes import (
    MAX_DEPTH,
    DistinctSAGEConv,
    Dropout,
    classes_of,
    expanded,
    node_keys,
    weighted_batch_norm,
)
from trappm.learner.paper.graphs import batches, to_data


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
    """Which nodes share a key, whatever the keys are."""
    first = {}
    return [first.setdefault(key, i) for i, key in enumerate(keys)]


@given(
    features=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=12),
    data=st.data(),
)
@settings(deadline=None)
def test_keys_tell_apart_exactly_what_differs_within_their_depth(features, data):
    count = len(features)
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    chosen = data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    rows = np.array(features, dtype=np.float32)
    edges = np.array(chosen, dtype=np.int64).reshape(-1, 2)
    actual = node_keys(rows, edges)
    for depth, expected in enumerate(plain_keys(rows, edges)):
        assert partition(actual[:, depth].tolist()) == partition(expected)


def test_keys_do_not_depend_on_the_order_of_nodes_or_edges():
    generator = np.random.default_rng(0)
    features = generator.integers(0, 3, (9, 2)).astype(np.float32)
    edges = np.array([(a, b) for a in range(9) for b in range(a + 1, 9) if (a + b) % 3 == 0])
    order = generator.permutation(9)
    place = np.argsort(order)
    shuffled = place[edges][generator.permutation(len(edges))]
    np.testing.assert_array_equal(
        node_keys(features[order], shuffled), node_keys(features, edges)[order]
    )


def layers_on_every_node(convolutions, norms, batch):
    x = expanded(batch.x)
    for convolution, norm in zip(convolutions, norms, strict=True):
        x = torch.relu(norm(convolution(x, batch.edge_index)))
    return x


@pytest.fixture
def networks(zoo):
    """Three layers over distinct nodes, the same of PyG, and a batch of repetitive graphs."""
    torch.manual_seed(0)
    widths = (113, 12, 10, 6)
    ours = nn.ModuleList(map(DistinctSAGEConv, widths, widths[1:]))
    theirs = nn.ModuleList(map(SAGEConv, widths, widths[1:]))
    theirs.load_state_dict(ours.state_dict())
    norms = [nn.ModuleList(nn.BatchNorm1d(w) for w in widths[1:]) for _ in range(2)]
    data = [to_data(graph, zoo.encoder.scaler) for graph in zoo.graphs[:20]]
    return ours, theirs, norms, next(batches(data, 10**9, range(20)))


@pytest.mark.parametrize("training", [True, False])
def test_rows_sums_statistics_and_gradients_are_those_of_every_node(networks, training):
    ours, theirs, (our_norms, their_norms), batch = networks
    our_norms.train(training)
    their_norms.train(training)
    expected = layers_on_every_node(theirs, their_norms, batch)

    classes = classes_of(batch, 3)
    x = classes.rows
    for convolution, norm, layer in zip(ours, our_norms, classes.layers, strict=True):
        x = torch.relu(weighted_batch_norm(norm, convolution(x, layer), layer.counts))

    assert len(x) < len(expected) / 2
    torch.testing.assert_close(x[classes.places], expected, rtol=1e-4, atol=1e-5)
    pooled = torch.sparse.mm(classes.pool, x)
    sums = global_add_pool(expected, batch.batch)
    torch.testing.assert_close(pooled, sums, rtol=1e-4, atol=1e-4)
    pooled.square().mean().backward()
    sums.square().mean().backward()
    for a, b in zip(
        [*ours.parameters(), *our_norms.parameters()],
        [*theirs.parameters(), *their_norms.parameters()],
        strict=True,
    ):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4)
    for a, b in zip(our_norms.buffers(), their_norms.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_dropout_drops_its_share_keeps_the_mean_and_follows_torchs_seed(share):
    dropout, x = Dropout(share), torch.ones(500, 400)
    torch.manual_seed(1)
    first = dropout(x)
    torch.manual_seed(1)
    torch.testing.assert_close(dropout(x), first, rtol=0, atol=0)
    assert not torch.equal(dropout(x), first)
    assert float((first == 0).float().mean()) == pytest.approx(share, abs=0.005)
    assert float(first.mean()) == pytest.approx(1.0, abs=0.01)
    assert dropout.eval()(x) is x
    torch.testing.assert_close(Dropout(0.0)(x), x)


def test_no_network_may_be_deeper_than_the_keys(zoo):
    batch = next(batches([to_data(zoo.graphs[0], zoo.encoder.scaler)], 10**9, [0]))
    with pytest.raises(ValueError, match="reach to depth"):
        classes_of(batch, MAX_DEPTH + 1)
