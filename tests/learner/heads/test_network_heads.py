"""TraPPM's networks as heads: they learn, keep their weights in tensors, and go on from others."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from trappm.learner.heads.device_heads import heads_from_tensors, train_heads
from trappm.learner.networks.presets import PAPER
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


def errors(heads, zoo, rows, targets):
    predictions = heads.predict(zoo.workloads(rows)[0])
    return 100 * np.mean(np.abs(predictions.median / targets[rows][:, :2] - 1), axis=0)


@pytest.fixture(scope="module")
def networks(small):
    return replace(small, head=replace(small.head, physical_prior=False, epochs=5, members=2))


@pytest.fixture(scope="module")
def trained(zoo, measure, networks):
    return train(zoo, np.arange(0, 96, 5), measure(zoo.graphs), networks)


def test_a_small_set_can_be_learned_by_heart(zoo, measure, networks):
    head = replace(networks.head, epochs=300, weight_decay=0.0)
    targets = measure(zoo.graphs)
    rows = np.arange(0, 24, 3)
    once = np.concatenate([rows, rows])  # so that no fold misses a graph
    groups = [str(i) for i in range(len(once))]
    heads = train(zoo, once, targets, replace(networks, head=head), groups)
    assert errors(heads, zoo, rows, targets).max() < 12


def test_the_papers_head_trains(zoo, measure):
    preset = replace(PAPER, head=replace(PAPER.head, epochs=2, members=2))
    rows = np.arange(4)
    heads = train(zoo, rows, measure(zoo.graphs), preset)
    assert np.isfinite(errors(heads, zoo, rows, measure(zoo.graphs))).all()


def test_tensors_and_settings_hold_the_whole_heads(trained, zoo, networks):
    again = heads_from_tensors(networks.head, trained.settings(), trained.tensors())
    workloads = zoo.workloads(range(96))[0]
    for name in ("median", "low", "high", "log_std", "disagreement"):
        first, second = (getattr(h.predict(workloads), name) for h in (trained, again))
        np.testing.assert_array_equal(first, second)


def test_transfer_goes_on_from_the_weights_of_the_source(trained, zoo, measure, networks):
    still = replace(networks, head=replace(networks.head, fine_tune_epochs=0))
    rows = np.arange(0, 96, 5)
    source = train(zoo, rows, measure(zoo.graphs), still)
    target = train(zoo, rows, measure(zoo.graphs, speed=0.5), still, init=source)
    for name, tensor in source.tensors().items():
        if "network" in name:
            assert torch.equal(tensor, target.tensors()[name])
    faster = target.predict(zoo.workloads(rows)[0]).median / source.predict(
        zoo.workloads(rows)[0]
    ).median  # fmt: skip
    np.testing.assert_allclose(faster[:, 0], 2.0, rtol=1e-4)


def test_transfer_needs_the_same_preset(trained, zoo, measure, networks):
    other = replace(networks, head=replace(networks.head, hidden=(8, 8)))
    with pytest.raises(InputError, match="another preset"):
        train(zoo, np.arange(8), measure(zoo.graphs), other, init=trained)


def test_intervals_contain_the_mean(trained, zoo):
    p = trained.predict(zoo.workloads(range(96))[0])
    assert np.all((p.low < p.median) & (p.median < p.high))
    assert np.all(p.log_std >= p.disagreement)


def test_workloads_without_embedding_are_refused(trained, zoo):
    assert trained.needs_embeddings
    with pytest.raises(InputError, match="no embedding"):
        trained.predict([Workload(graph=zoo.graphs[0])])
    with pytest.raises(InputError, match="embeddings have shape"):
        trained.predict([Workload(graph=zoo.graphs[0], embedding=np.zeros(3, np.float32))])


def test_progress_counts_every_epoch_of_every_network(zoo, measure, networks):
    seen = []
    rows = np.arange(0, 30, 3)
    train(zoo, rows, measure(zoo.graphs), networks, on_progress=lambda *p: seen.append(p))
    total = networks.head.members * networks.head.epochs
    assert seen == [(i + 1, total) for i in range(total)]


def test_gradients_are_those_of_the_last_layers(trained, zoo):
    workloads, _ = zoo.workloads(range(5))
    rows = trained.gradients(workloads)
    width = trained.preset.hidden[-1]
    assert rows.shape == (5, len(trained.members) * width)
    member = trained.members[0].network
    weights = member.output.weight[0].numpy()
    bias = float(member.output.bias[0])
    own = rows[:, :width] * np.sqrt(len(trained.members))
    metric = trained.metrics[0]
    said = trained._member_logs(*zoo.rows(range(5))[:2])[0, :, 0]
    output = (said - trained.members[0].levels[metric]) / trained.scale[metric]
    assert own @ weights + bias == pytest.approx(output, abs=1e-4)
