"""Heads: accuracy from few labels, missing metrics, transfer, honest spreads, determinism."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from learner.heads import Heads, train_heads
from learner.presets import PAPER
from profiler.errors import InputError


def train(zoo, rows, targets, preset, seed=0, **options):
    graphs, embeddings, groups = zoo.rows(rows)
    return train_heads(
        graphs,
        embeddings,
        targets[rows],
        groups=groups,
        preset=preset.head,
        generator=np.random.default_rng(seed),
        **options,
    )


def split(zoo, labels, seed=0):
    """Indices of so many labels, and of all graphs of eight other architectures."""
    generator = np.random.default_rng(seed)
    names = np.array(zoo.names)
    held_out = np.isin(names, generator.permutation(np.unique(names))[:8])
    return generator.permutation(np.flatnonzero(~held_out))[:labels], np.flatnonzero(held_out)


def errors(heads, zoo, rows, targets):
    """MAPE of each metric on these rows."""
    predictions = heads.predict([zoo.graphs[i] for i in rows], zoo.embeddings[rows])
    columns = [("step_time_ms", "memory_mib", "power_w").index(m) for m in predictions.metrics]
    return 100 * np.mean(np.abs(predictions.mean / targets[np.ix_(rows, columns)] - 1), axis=0)


@pytest.fixture(scope="module")
def trained(zoo, measure, small):
    targets = measure(zoo.graphs, noise_seed=1)
    rows, held_out = split(zoo, 40)
    return train(zoo, rows, targets, small), rows, held_out, targets


def test_forty_labels_suffice_for_architectures_never_seen(trained, zoo):
    heads, _, held_out, targets = trained
    step_time, memory = errors(heads, zoo, held_out, targets)
    assert step_time < 20
    assert memory < 8


def test_networks_learn_what_the_prior_cannot_say(zoo, measure, small):
    """Networks with a certain operator are twice as slow all over: no term can say that."""
    targets = measure(zoo.graphs)
    targets[["Gelu" in graph.operators for graph in zoo.graphs], 0] *= 2
    targets[["HardSwish" in graph.operators for graph in zoo.graphs], 0] /= 2
    rows, held_out = split(zoo, 60)
    heads = train(zoo, rows, targets, small)
    silent = replace(heads, share=dict.fromkeys(heads.metrics, 0.0))
    with_networks, prior_only = (errors(h, zoo, held_out, targets)[0] for h in (heads, silent))
    assert heads.share["step_time_ms"] > 0.3
    assert with_networks < 0.9 * prior_only


def test_a_metric_without_labels_has_no_head_and_one_with_a_few_has(zoo, measure, small):
    targets = measure(zoo.graphs)
    rows, held_out = split(zoo, 20)
    assert train(zoo, rows, targets, small).metrics == ("step_time_ms", "memory_mib")
    targets[rows[:3], 2] = 40.0
    heads = train(zoo, rows, targets, small)
    assert heads.metrics == ("step_time_ms", "memory_mib", "power_w")
    power = heads.predict([zoo.graphs[i] for i in held_out], zoo.embeddings[held_out]).mean[:, 2]
    assert np.all((power > 40 / 3) & (power < 3 * 40))


def test_a_missing_value_changes_nothing_for_the_other_metric_of_the_prior(zoo, measure, small):
    targets = measure(zoo.graphs)
    rows, _ = split(zoo, 20)
    some = targets.copy()
    some[rows[::2], 1] = np.nan
    full, part = (train(zoo, rows, t, small) for t in (targets, some))
    for a, b in zip(full.members, part.members, strict=True):
        np.testing.assert_array_equal(
            a.coefficients["step_time_ms"], b.coefficients["step_time_ms"]
        )
    assert np.isfinite(errors(part, zoo, rows, targets)).all()


def test_a_small_set_can_be_learned_by_heart_without_any_prior(zoo, measure, small):
    head = replace(small.head, physical_prior=False, epochs=300, weight_decay=0.0, members=2)
    preset = replace(small, head=head)
    targets = measure(zoo.graphs)
    rows = np.arange(0, 24, 3)
    once = np.concatenate([rows, rows])  # so that no fold misses a graph
    graphs, embeddings, _ = zoo.rows(once)
    groups = [str(i) for i in range(len(once))]
    heads = train_heads(
        graphs, embeddings, targets[once], groups=groups, preset=preset.head,
        generator=np.random.default_rng(0),
    )  # fmt: skip
    assert errors(heads, zoo, rows, targets).max() < 12


def test_the_papers_head_trains(zoo, measure):
    preset = replace(PAPER, head=replace(PAPER.head, epochs=2, members=2))
    rows = np.arange(4)
    heads = train(zoo, rows, measure(zoo.graphs), preset)
    assert np.isfinite(errors(heads, zoo, rows, measure(zoo.graphs))).all()


def test_absolute_size_is_not_lost(trained, zoo):
    heads = trained[0]
    predictions = heads.predict(zoo.graphs[21:24], zoo.embeddings[21:24])
    assert [zoo.graphs[i].batch_size for i in (21, 22, 23)] == [1, 4, 16]
    step_time = predictions.mean[:, 0]
    assert 2 < step_time[1] / step_time[0] < 5
    assert 2 < step_time[2] / step_time[1] < 5


@pytest.mark.parametrize("seed", range(3))
def test_from_eight_labels_transfer_beats_training_from_scratch(trained, zoo, measure, small, seed):
    source = trained[0]
    targets = measure(zoo.graphs, speed=0.37, noise_seed=7)
    rows, held_out = split(zoo, 8, seed)
    transferred = errors(train(zoo, rows, targets, small, init=source), zoo, held_out, targets)
    scratch = errors(train(zoo, rows, targets, small), zoo, held_out, targets)
    assert transferred[0] < scratch[0]
    assert transferred[0] < 20


def test_transfer_needs_the_same_preset_and_encoder(trained, zoo, measure, small):
    other = replace(small, head=replace(small.head, hidden=(8, 8)))
    with pytest.raises(InputError, match="another preset"):
        train(zoo, np.arange(8), measure(zoo.graphs), other, init=trained[0])


def test_intervals_hold_most_new_architectures_and_contain_the_mean(trained, zoo):
    heads, _, held_out, targets = trained
    p = heads.predict([zoo.graphs[i] for i in held_out], zoo.embeddings[held_out])
    assert np.all((p.low < p.mean) & (p.mean < p.high))
    assert np.all(p.log_std >= p.disagreement)
    inside = (p.low <= targets[held_out, :2]) & (targets[held_out, :2] <= p.high)
    assert inside.mean() > 0.75


def test_same_seed_same_heads_and_another_seed_another(zoo, measure, small):
    targets = measure(zoo.graphs)
    rows, _ = split(zoo, 12)

    def weights(seed):
        heads = train(zoo, rows, targets, small, seed)
        return torch.cat([v.flatten().double() for v in heads.tensors().values()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_predictions_do_not_depend_on_what_is_asked_beside(trained, zoo):
    heads = trained[0]
    together = heads.predict(zoo.graphs, zoo.embeddings).mean
    alone = heads.predict(zoo.graphs[9:10], zoo.embeddings[9:10]).mean
    np.testing.assert_allclose(alone[0], together[9], rtol=1e-4)
    assert heads.predict([], zoo.embeddings[:0]).mean.shape == (0, 2)


def test_tensors_and_settings_hold_the_whole_heads(trained, zoo, small):
    heads = trained[0]
    again = Heads.from_tensors(small.head, heads.settings(), heads.tensors())
    for name in ("mean", "low", "high", "log_std", "disagreement"):
        first, second = (
            getattr(h.predict(zoo.graphs, zoo.embeddings), name) for h in (heads, again)
        )
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("labels", [2, 3])
def test_two_labels_are_enough_to_say_something(zoo, measure, small, labels):
    targets = measure(zoo.graphs)
    one_architecture = np.arange(labels)  # not even two architectures
    heads = train(zoo, one_architecture, targets, small)
    assert errors(heads, zoo, one_architecture, targets)[0] < 60


def test_wrong_shapes_and_values_are_refused(zoo, measure, small):
    targets = measure(zoo.graphs)
    graphs, embeddings, groups = zoo.rows(np.arange(6))
    good = {"groups": groups, "preset": small.head, "generator": np.random.default_rng(0)}
    with pytest.raises(InputError, match="targets have shape"):
        train_heads(graphs, embeddings, targets[:6, 0], **good)
    with pytest.raises(InputError, match="targets have shape"):
        train_heads(graphs, embeddings, targets[:1], **good)
    with pytest.raises(InputError, match="embeddings have shape"):
        train_heads(graphs, embeddings[:5], targets[:6], **good)
    with pytest.raises(InputError, match="groups have shape"):
        train_heads(graphs, embeddings, targets[:6], **{**good, "groups": groups[:5]})
    for bad in (0.0, -1.0, np.inf):
        broken = targets[:6].copy()
        broken[2, 0] = bad
        with pytest.raises(InputError, match="zero, negative or infinite"):
            train_heads(graphs, embeddings, broken, **good)
    with pytest.raises(InputError, match="too few"):
        train_heads(graphs, embeddings, np.full((6, 3), np.nan), **good)
    heads = train_heads(graphs, embeddings, targets[:6], **good)
    with pytest.raises(InputError, match="embeddings have shape"):
        heads.predict(graphs, embeddings[:, :4])


def test_progress_counts_every_epoch_of_every_network(zoo, measure, small):
    seen = []
    train(
        zoo, np.arange(0, 30, 3), measure(zoo.graphs), small,
        on_progress=lambda *p: seen.append(p),
    )  # fmt: skip
    total = small.head.members * small.head.epochs
    assert seen == [(i + 1, total) for i in range(total)]
