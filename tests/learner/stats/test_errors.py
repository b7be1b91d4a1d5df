"""Errors computed by hand, and splits that hold whole architectures out."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trappm.learner.stats.errors import accuracy, kendall_tau, split_architectures
from trappm.profiler.models.families import family_of
from trappm.profiler.records import Configuration


def test_errors_of_a_small_example():
    measured = np.array([100.0, 200.0, 50.0, np.nan])
    predicted = np.array([110.0, 150.0, 50.0, 1.0])
    actual = accuracy(measured, predicted, predicted - 11, predicted + 11)
    assert actual["count"] == 3
    assert actual["mape"] == pytest.approx((10 + 25 + 0) / 3)
    assert actual["median_ape"] == pytest.approx(10)
    assert actual["rmse"] == pytest.approx(np.sqrt((10**2 + 50**2) / 3))
    assert actual["within_10_percent"] == pytest.approx(200 / 3)
    assert actual["kendall_tau"] == pytest.approx(1.0)
    assert actual["coverage"] == pytest.approx(200 / 3)
    assert accuracy(measured, predicted)["coverage"] is None


def test_kendall_tau_needs_two_distinct_values():
    ranks = np.array([1.0, 2.0, 2.0, 3.0])
    assert kendall_tau(ranks, -ranks) == pytest.approx(-1.0)
    assert kendall_tau(ranks, np.ones(4)) is None
    assert kendall_tau(ranks[:1], ranks[:1]) is None


POOL = [
    Configuration(architecture=name, batch_size=batch, input_size=64)
    for name in (
        "resnet10t", "resnet18", "resnet26", "resnet34", "resnet50", "vgg11", "vgg13", "vgg16",
        "convnext_atto", "convnext_femto", "densenet121", "vit_tiny_patch16_224",
    )
    for batch in (1, 2)
]  # fmt: skip
ARCHITECTURES = {c.architecture for c in POOL}


@given(share=st.floats(0.01, 0.9), seed=st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_a_split_respects_its_share_and_families(share, seed):
    held_out = split_architectures(POOL, share, np.random.default_rng(seed))
    assert held_out == split_architectures(POOL, share, np.random.default_rng(seed))
    assert held_out < ARCHITECTURES
    assert len(held_out) >= 1
    most = sum(
        len(list(g)) - 1
        for _, g in itertools.groupby(sorted(ARCHITECTURES, key=family_of), family_of)
    )
    assert len(held_out) <= most
    assert len(held_out) <= share * len(ARCHITECTURES) + 1
    assert {family_of(a) for a in ARCHITECTURES - held_out} == {family_of(a) for a in ARCHITECTURES}


def test_splits_have_the_requested_share_on_average():
    splits = [split_architectures(POOL, 0.25, np.random.default_rng(s)) for s in range(300)]
    assert np.mean([len(s) for s in splits]) == pytest.approx(3, abs=0.3)
    assert set().union(*splits) >= {a for a in ARCHITECTURES if family_of(a) in ("resnet", "vgg")}
    assert np.mean(["resnet" in map(family_of, s) for s in splits]) > 0.9
