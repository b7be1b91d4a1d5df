"""TraPPM's networks as heads: what the bench trains, kept in tensors, going on from others."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from trappm.learner.heads.device_heads import heads_from_tensors, train_heads
from trappm.learner.workload import Workload
from trappm.profiler.errors import InputError


def train(zoo, rows, targets, preset, groups=None, **options):
    workloads, names = zoo.workloads(rows)
    return train_heads(
        workloads,
        targets[rows],
        groups=groups or names,
        preset=preset.head,
        generator=np.random.default_rng(0),
        **options,
    )


@pytest.fixture(scope="module")
def networks(small):
    return replace(small, head=replace(small.head, physical_prior=False, steps=40, members=2))


@pytest.fixture(scope="module")
def trained(zoo, measure, networks):
    return train(zoo, np.arange(0, 96, 5), measure(zoo.graphs), networks)


def test_heads_are_restored_from_tensors_and_settings(trained, zoo, networks):
    again = heads_from_tensors(networks.head, trained.settings(), trained.tensors())
    workloads = zoo.workloads(range(96))[0]
    for name in ("median", "low", "high", "log_std", "disagreement"):
        first, second = (getattr(h.predict(workloads), name) for h in (trained, again))
        np.testing.assert_array_equal(first, second)


def test_transfer_starts_from_the_source_weights(trained, zoo, measure, networks):
    still = replace(networks, head=replace(networks.head, steps=0))
    rows = np.arange(0, 96, 5)
    source = train(zoo, rows, measure(zoo.graphs), still)
    same, slower = (
        train(zoo, rows, measure(zoo.graphs, speed=speed), still, init=source)
        for speed in (1.0, 0.5)
    )
    for name, tensor in source.tensors().items():
        if ".network" in name:
            assert torch.equal(tensor, slower.tensors()[name])
    as_long = slower.predict(zoo.workloads(rows)[0]).median[:, 0]
    np.testing.assert_allclose(as_long / same.predict(zoo.workloads(rows)[0]).median[:, 0], 2.0)


def test_workloads_without_a_valid_embedding_are_refused(trained, zoo):
    assert trained.needs_embeddings
    with pytest.raises(InputError, match="no embedding"):
        trained.predict([Workload(graph=zoo.graphs[0])])
    with pytest.raises(InputError, match="vectors of graphs have shape"):
        trained.predict([Workload(graph=zoo.graphs[0], embedding=np.zeros(3, np.float32))])


def test_gradients_are_those_of_the_last_layers(trained, zoo):
    workloads, _ = zoo.workloads(range(5))
    rows = trained.gradients(workloads)
    width = trained.preset.hidden[-1]
    head = trained.heads["step_time_ms"]
    assert rows.shape == (5, len(trained.metrics) * len(head.networks) * width)
    outputs = []
    for number, network in enumerate(head.networks):
        own = rows[:, number * width : (number + 1) * width] * np.sqrt(len(head.networks))
        outputs.append(own @ network.output.weight[0].numpy() + float(network.output.bias[0]))
    logs = head.scales.center + head.scales.scale * np.mean(outputs, axis=0)
    np.testing.assert_allclose(np.exp(logs), head.predict(workloads).median, rtol=1e-4)
