"""Strategies that only replays offer: shares of families, coverage, LCMD, and their gradients."""

from dataclasses import replace

import numpy as np
import pytest

from research.replay.replay import named_strategy
from research.replay.strategies import STUDIED, ReplayRequest
from trappm.learner.acquisition import PoolCovariance


def request(n=60, seed=0, count=8, **options):
    """A pool of six clusters, some of it labelled."""
    generator = np.random.default_rng(seed)
    cluster = generator.choice(6, n)
    embeddings = generator.normal(0, 3, (6, 12))[cluster] + generator.normal(0, 0.5, (n, 12))
    values = {
        "embeddings": embeddings.astype(np.float32),
        "static_features": np.exp(generator.normal(3, 1, (n, 6))),
        "labelled": np.arange(0, n, 10),
        "candidates": np.arange(n),
        "count": count,
        "generator": np.random.default_rng(seed + 1),
        "families": [f"family {k}" for k in cluster],
        "covariances": [PoolCovariance(generator.normal(0, 1, (n, 10)).astype(np.float32), 0.1)],
    }
    return ReplayRequest(**{**values, **options})


def unlabelled(**options):
    """The same pool without labels."""
    return request(labelled=np.zeros(0, dtype=np.int64), **options)


def picks_of(name, query):
    return [pick.index for pick in named_strategy(name).select(query)]


@pytest.mark.parametrize("name", [strategy.name for strategy in STUDIED])
def test_only_open_candidates_are_picked_once_each(name):
    for query in (request(candidates=np.arange(0, 60, 2)), unlabelled()):
        picks = picks_of(name, query)
        assert len(set(picks)) == 8
        assert set(picks) <= set(query.open.tolist())


def test_lcmd_agrees_with_bmdal_reg(monkeypatch):
    """The reference peer, on the same vectors."""
    pytest.importorskip("bmdal_reg")
    monkeypatch.setattr(np, "Inf", np.inf, raising=False)  # bmdal_reg is older than NumPy 2
    import torch
    from bmdal_reg.bmdal.algorithms import select_batch
    from bmdal_reg.bmdal.feature_data import TensorFeatureData

    query = request(n=200, count=12)
    points = torch.from_numpy(query.points)
    theirs, _ = select_batch(
        batch_size=12,
        models=[torch.nn.Identity()],
        data={
            "train": TensorFeatureData(points[query.known]),
            "pool": TensorFeatureData(points[query.open]),
        },
        y_train=None,
        base_kernel="linear",
        kernel_transforms=[],
        selection_method="lcmd",
        sel_with_train=True,
    )
    ours = picks_of("lcmd-gradients", replace(query, gradients=query.points))
    assert query.open[theirs.numpy()].tolist() == ours
