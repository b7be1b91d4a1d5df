"""The graph autoencoder: the paper's sizes, what training achieves, and what must not vary."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch_geometric.nn import global_add_pool
from workload_samples import one_layer

from trappm.learner.paper.distinct_nodes import classes_of, node_keys
from trappm.learner.paper.encoder import (
    Encoder,
    EncoderNetwork,
    edge_logits,
    reconstruction_loss,
    sample_negatives,
    train_encoder,
)
from trappm.learner.paper.graphs import batches, to_data
from trappm.learner.paper.presets import PAPER
from trappm.learner.paper.regressor import HeadNetwork


def batch_of(zoo, graphs):
    data = [to_data(graph, zoo.encoder.scaler) for graph in graphs]
    return next(batches(data, 10**9, range(len(data))))


def test_training_separates_edges_from_other_pairs(zoo, small):
    batch = batch_of(zoo, zoo.graphs)
    torch.manual_seed(0)
    untrained = EncoderNetwork(small.encoder).eval()
    with torch.no_grad():
        before = reconstruction_loss(untrained.nodes(batch), batch)
        z = zoo.encoder.network.nodes(batch)
        assert reconstruction_loss(z, batch) < before
        edges = edge_logits(z, batch.edge_index)
        others = edge_logits(z, sample_negatives(batch))
    auc = (edges[:, None] > others[None, :]).float().mean()
    assert auc > 0.6


def test_drawn_pairs_are_no_edges_and_lie_in_one_graph(zoo):
    batch = batch_of(zoo, zoo.graphs[:3])
    edges = {frozenset(pair) for pair in batch.edge_index.T.tolist()}
    torch.manual_seed(0)
    drawn = [sample_negatives(batch) for _ in range(20)]
    for first, second in torch.cat(drawn, dim=1).T.tolist():
        assert frozenset((first, second)) not in edges
        assert first != second
        assert batch.batch[first] == batch.batch[second]
    sources = batch.edge_index[0].unique()
    assert torch.equal(torch.cat(drawn, dim=1)[0].unique(), sources)


def test_equal_seeds_give_equal_encoders(zoo, small):
    preset = replace(small.encoder, steps=2)

    def weights(seed):
        encoder = train_encoder(zoo.graphs[:12], preset, np.random.default_rng(seed))
        return torch.cat([v.flatten().float() for v in encoder.tensors().values()])

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


def test_graphs_without_edges_are_scaled_and_not_learned_from(zoo, small):
    encoder = train_encoder(
        [*zoo.graphs[:12], one_layer(10)], replace(small.encoder, steps=2), np.random.default_rng(0)
    )
    assert encoder.embed([one_layer(10)]).shape == (1, encoder.width)


def test_embeddings_sum_over_nodes_and_ignore_other_graphs(zoo):
    graph = zoo.graphs[7]
    with torch.no_grad():
        nodes = zoo.encoder.network.nodes(batch_of(zoo, [graph]))
    alone = zoo.encoder.embed([graph])
    np.testing.assert_allclose(alone[0], nodes.sum(dim=0).numpy(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(alone[0], zoo.embeddings[7], rtol=1e-4, atol=1e-4)
    assert alone.dtype == np.float32
    assert zoo.encoder.embed([]).shape == (0, zoo.encoder.width)


def test_the_encoder_is_restored_from_tensors(zoo, small):
    again = Encoder.from_tensors(small.encoder, zoo.encoder.tensors())
    np.testing.assert_array_equal(again.embed(zoo.graphs), zoo.embeddings)


# Computing each distinct node once gives what PyG's layers give on every node.


def test_keys_count_equal_predecessors():
    keys = node_keys(np.zeros((5, 1), np.float32), np.array([[0, 2], [1, 2], [0, 3], [1, 4]]))
    assert keys[2, 1] != keys[3, 1] == keys[4, 1]
    assert len(set(keys[:, 0].tolist())) == 1


@pytest.mark.parametrize("training", [True, False])
def test_the_encoder_over_distinct_nodes_equals_pyg(zoo, training):
    batch = batch_of(zoo, zoo.graphs[:20])
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


def test_the_paper_preset_has_the_sizes_of_the_paper():
    network = EncoderNetwork(PAPER.encoder)
    sizes = [(c.in_channels, c.out_channels) for c in network.convolutions]
    assert sizes == [(113, 1024), (1024, 512), (512, 512), (512, 512)]
    assert [n.num_features for n in network.norms] == [1024, 512, 512, 512]
    assert network.dropout.p == 0.5
    assert PAPER.encoder.learning_rate == 5e-4

    head = HeadNetwork(PAPER.head, 512 + 6)
    assert [(c.in_channels, c.out_channels) for c in head.convolutions] == [(113, 512), (512, 512)]
    assert head.layers[0].in_features == 1030
    assert len(head.layers) == 2
    assert head.dropout.p == 0.05
    assert (PAPER.head.learning_rate, PAPER.head.members) == (1e-3, 1)
    assert PAPER.head.loss == "squared-log"
