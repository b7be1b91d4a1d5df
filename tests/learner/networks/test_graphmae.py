"""GraphMAE: it guesses what was masked, and is an encoder as the other one is."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from trappm.learner.networks.dataset import batches, to_data
from trappm.learner.networks.gae import Encoder, train_encoder
from trappm.learner.networks.graphmae import GinNetwork, MaskedAutoencoder


@pytest.fixture(scope="module")
def preset(small):
    return replace(small.encoder, masked=True, widths=(16, 8, 8), steps=300)


@pytest.fixture(scope="module")
def encoder(zoo, preset):
    return train_encoder(zoo.graphs, preset, np.random.default_rng(0))


def whole_batch(zoo):
    data = [to_data(graph, zoo.encoder.scaler) for graph in zoo.graphs[-6:]]
    return next(batches(data, 10**9, range(len(data))))


def apart(batch):
    """The same nodes, none of them computed for another."""
    count = batch.keys_by_depth.shape[0]
    batch.keys_by_depth = torch.arange(count)[:, None].expand(-1, batch.keys_by_depth.shape[1])
    return batch


def test_layers_are_those_of_gin(zoo, preset):
    torch.manual_seed(0)
    network = GinNetwork(preset).eval()
    batch = apart(whole_batch(zoo))
    classes = network.classes(batch)
    x, (source, target) = classes.rows, batch.edge_index
    for gin in network.layers:
        summed = (1 + gin.eps) * x + torch.zeros_like(x).index_add(0, target, x[source])
        hidden = functional.relu(gin.norm(gin.first(summed)))
        x = functional.relu(gin.second(hidden))
    torch.testing.assert_close(network(classes), x)


def test_equal_nodes_once_are_all_nodes(zoo, preset):
    torch.manual_seed(0)
    network = GinNetwork(preset).eval()
    once, all_of_them = whole_batch(zoo), apart(whole_batch(zoo))
    classes = network.classes(once)
    assert classes.pool.shape[1] < len(classes.places)
    rows = network(classes)[classes.places]
    torch.testing.assert_close(rows, network(network.classes(all_of_them)), rtol=1e-4, atol=1e-5)


def test_what_is_masked_is_not_seen_and_what_is_not_masked_is_not_judged(zoo, preset, monkeypatch):
    torch.manual_seed(0)
    learner = MaskedAutoencoder(preset).eval()
    batch = whole_batch(zoo)
    monkeypatch.setattr(torch, "rand", torch.ones)
    assert learner.loss(batch) == 0.0
    monkeypatch.setattr(torch, "rand", torch.zeros)
    given = []
    learner.encoder.layers[0].register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    learner.decoder.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    assert 0.0 < learner.loss(batch) <= 4.0
    assert [len(torch.unique(rows, dim=0)) for rows in given] == [1, 1]


def test_it_learns_to_guess_masked_nodes(zoo, preset):
    learner, batch = MaskedAutoencoder(preset), whole_batch(zoo)
    optimizer = torch.optim.Adam(learner.parameters(), lr=3e-3)
    losses = []
    for _ in range(150):
        optimizer.zero_grad()
        losses.append(learner.loss(batch))
        losses[-1].backward()
        optimizer.step()
    assert sum(losses[-20:]) < 0.5 * sum(losses[:20])


def test_embeddings_are_kept_by_name_and_know_the_batch_size(zoo, preset, encoder):
    again = Encoder.from_tensors(preset, encoder.tensors())
    embeddings = encoder.embed(zoo.graphs)
    assert embeddings.shape == (len(zoo.graphs), 8)
    np.testing.assert_array_equal(again.embed(zoo.graphs), embeddings)
    assert np.abs(embeddings[0] - embeddings[2]).max() > 0.1
    assert not any(p.requires_grad for p in encoder.network.parameters())
