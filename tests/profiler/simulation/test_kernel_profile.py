"""A kernel profile survives its bytes, is affine in the batch size; nothing else passes for it."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trappm.profiler.errors import TrappmError
from trappm.profiler.records import MemoryFormat, Phase, Precision
from trappm.profiler.simulation.kernel_profile import (
    KernelKind,
    KernelProfile,
    KernelTable,
    Pass,
    Size,
)


def table(count, seed=0):
    random = np.random.default_rng(seed)
    return KernelTable(
        kinds=random.choice(list(KernelKind), count).astype(np.int8),
        passes=random.choice(list(Pass), count).astype(np.int8),
        counts=random.integers(1, 9, count).astype(np.int32),
        half=random.random(count) < 0.5,
        channels_last=random.random(count) < 0.5,
        sizes=random.integers(0, 1 << 30, (count, len(Size), 2)),
        windows=random.integers(1, 50, count).astype(np.int32),
        strides=random.integers(1, 3, count).astype(np.int32),
        pixels=random.integers(1, 999, count).astype(np.int32),
    )


@pytest.fixture
def profile():
    return KernelProfile(
        train=table(40),
        infer=table(15, seed=1),
        parameter_tensors=7,
        parameters=12_345,
        precision=Precision.AMP_BF16,
        memory_format=MemoryFormat.CHANNELS_LAST,
        fused_attention=False,
        batch_size=None,
    )


def test_profiles_are_read_back_unchanged(profile):
    data = profile.to_bytes()
    again = KernelProfile.from_bytes(data)
    assert again.to_bytes() == data
    for field in fields(KernelProfile):
        if field.name not in ("train", "infer"):
            assert getattr(again, field.name) == getattr(profile, field.name)
    for phase in Phase:
        for field in fields(KernelTable):
            stored, made = (getattr(p.table(phase), field.name) for p in (again, profile))
            np.testing.assert_array_equal(stored, made)


@given(first=st.integers(1, 10_000), second=st.integers(1, 10_000))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
def test_sizes_are_affine_in_the_batch_size(profile, first, second):
    sizes = [profile.at(b, Phase.TRAIN).sizes for b in (first, second, first + second)]
    fixed = profile.train.sizes[..., 0]
    np.testing.assert_allclose(sizes[0] + sizes[1] - fixed, sizes[2], rtol=1e-12)


@pytest.mark.parametrize("batch_size", [0, -3])
def test_batch_sizes_below_one_are_refused(profile, batch_size):
    with pytest.raises(TrappmError, match=str(batch_size)):
        profile.at(batch_size)


def test_fixed_profiles_accept_only_their_batch_size(profile):
    fixed = replace(profile, batch_size=8)
    assert KernelProfile.from_bytes(fixed.to_bytes()).batch_size == 8
    fixed.at(8)
    with pytest.raises(TrappmError, match="8"):
        fixed.at(9)
