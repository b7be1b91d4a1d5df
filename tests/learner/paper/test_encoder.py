"""The graph autoencoder: the paper's sizes, what training achieves, and what must not vary."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from trappm.learner.paper.encoder import (
    Encoder,
    EncoderNetwork,
    edge_logits,
    reconstruction_loss,
    sample_negatives,
    train_encoder,
)
from trappm.learner.paper.graphs import batches, to_data
from trappm.learner.paper.presets import LAPTOP, PAPER, preset_named
from trappm.learner.paper.regressor import HeadNetwork
from trappm.profiler.errors import InputError


def whole_batch(zoo):
    data = [to_data(graph, zoo.encoder.scaler) for graph in zoo.graphs]
    return next(batches(data, 10**9, range(len(data))))


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


def test_presets_are_found_by_name():
    assert preset_named("laptop") is LAPTOP
    with pytest.raises(InputError, match="did you mean 'laptop'"):
        preset_named("labtop")


def test_training_separates_edges_from_other_pairs(zoo, small):
    batch = whole_batch(zoo)
    torch.manual_seed(0)
    untrained = EncoderNetwork(small.encoder).eval()
    with torch.no_grad():
        before = reconstruction_loss(untrained.nodes(batch), batch)
        z = zoo.encoder.network.nodes(batch)
        assert reconstruction_loss(z, batch) < before
        edges = edge_logits(z, batch.edge_index)
        others = edge_logits(z, sample_negatives(batch))
    auc = (edges[:, None] > others[None, :]).float().mean()
    assert auc > 0.65


def test_equal_seeds_give_equal_encoders(zoo, small):
    preset = replace(small.encoder, steps=2)

    def weights(seed):
        encoder = train_encoder(zoo.graphs[:12], preset, np.random.default_rng(seed))
        return torch.cat([v.flatten().float() for v in encoder.tensors().values()])

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


def test_training_does_not_change_the_global_random_state(zoo, small):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train_encoder(zoo.graphs[:6], replace(small.encoder, steps=1), np.random.default_rng(0))
    assert torch.equal(torch.rand(3), expected)


def test_embeddings_sum_over_nodes_and_ignore_other_graphs(zoo):
    graph = zoo.graphs[7]
    batch = next(batches([to_data(graph, zoo.encoder.scaler)], 10**9, [0]))
    with torch.no_grad():
        nodes = zoo.encoder.network.nodes(batch)
    alone = zoo.encoder.embed([graph])
    np.testing.assert_allclose(alone[0], nodes.sum(dim=0).numpy(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(alone[0], zoo.embeddings[7], rtol=1e-4, atol=1e-4)
    assert alone.dtype == np.float32
    assert zoo.encoder.embed([]).shape == (0, zoo.encoder.width)


def test_the_encoder_is_restored_from_tensors(zoo, small):
    again = Encoder.from_tensors(small.encoder, zoo.encoder.tensors())
    np.testing.assert_array_equal(again.embed(zoo.graphs), zoo.embeddings)


def test_progress_is_reported_and_empty_training_sets_are_refused(zoo, small):
    seen = []
    preset = replace(small.encoder, steps=50)
    train_encoder(zoo.graphs[:4], preset, np.random.default_rng(0), lambda *p: seen.append(p))
    assert seen == [(20, 50), (40, 50), (50, 50), (50, 50)]
    with pytest.raises(InputError, match="no graphs"):
        train_encoder([], preset, np.random.default_rng(0))
