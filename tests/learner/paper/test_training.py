"""Training goes by steps, and by what it has not seen."""

import numpy as np
import pytest
import torch
from torch import nn

from trappm.learner.paper.graphs import fit_node_scaler, to_data
from trappm.learner.paper.training import train


class Line(nn.Module):
    """One slope over a number that stands as the vector of each graph."""

    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.zeros(()))

    def forward(self, batch):
        return self.slope * batch.vector


@pytest.fixture
def data(zoo):
    scaler = fit_node_scaler(zoo.graphs)

    def with_slope(slope, count=12):
        return [
            to_data(graph, scaler, vector=np.array([x]), target=np.array([slope * x]))
            for graph, x in zip(zoo.graphs[:count], np.linspace(1, 2, count), strict=True)
        ]

    return with_slope


def trained(learned, held_out, steps, batch_nodes=10**6):
    network, taken = Line(), []
    train(
        network, lambda batch: (network(batch) - batch.y).square().mean(), learned, held_out,
        steps=steps, learning_rate=0.01, weight_decay=0.0, batch_nodes=batch_nodes,
        generator=np.random.default_rng(0), on_step=lambda done, total: taken.append(done),
    )  # fmt: skip
    return float(network.slope), taken


def test_few_graphs_train_for_as_many_steps_as_many(data):
    """Forty epochs of one batch, which they had before, would end at a slope of 0.4."""
    slope, _ = trained(data(1.0, 3), data(1.0, 3), 1_000, batch_nodes=60)
    assert slope == pytest.approx(1.0, abs=0.02)


def test_training_stops_when_the_held_out_loss_rises(data):
    """On the way to a slope of one, it passes the half that holds of what it does not see."""
    slope, taken = trained(data(1.0), data(0.5), 4_000)
    assert slope == pytest.approx(0.5, abs=0.15)
    assert taken[-2] < 2_000, "it did not stop early"
    assert taken[-1] == 4_000
