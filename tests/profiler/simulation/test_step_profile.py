"""A step profile survives its bytes, and nothing else passes for one."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from trappm.profiler.errors import InputError, TrappmError, UnsupportedModelError
from trappm.profiler.models.model_input import Sample
from trappm.profiler.records import Optimizer
from trappm.profiler.simulation.step_profile import StepProfile
from trappm.profiler.static_profile import static_profile, step_profile


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 10)
        self.convolution.bias.requires_grad_(False)

    def forward(self, x):
        return self.head(self.norm(self.convolution(x)).relu().mean((2, 3)))


@pytest.fixture(scope="module")
def profile():
    return step_profile(Tiny(), 16)


def arrays_of(data):
    with np.load(io.BytesIO(data)) as archive:
        return dict(archive)


def archive_of(arrays):
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def test_a_profile_counts_parameters_that_are_trained_and_those_that_are_not(profile):
    assert profile.trainable_parameters == 8 * 27 + 8 + 8 + 80 + 10
    assert profile.frozen_parameters == 8


def test_a_profile_survives_its_bytes(profile):
    data = profile.to_bytes()
    again = StepProfile.from_bytes(data)
    assert again.to_bytes() == data
    assert again.saved_bytes == profile.saved_bytes
    assert again.trainable_parameters == profile.trainable_parameters
    assert again.frozen_parameters == profile.frozen_parameters
    for optimizer in Optimizer:
        assert again.memory(5, optimizer) == profile.memory(5, optimizer)


def test_two_profiles_of_one_model_have_the_same_bytes(profile):
    assert step_profile(Tiny(), 16).to_bytes() == profile.to_bytes()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_damaged_bytes_raise_one_kind_of_error_or_are_harmless(profile, data):
    stored = bytearray(profile.to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        stored[data.draw(st.integers(0, len(stored) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.sampled_from([len(stored), len(stored) // 2, len(stored) - 1, 0]))
    with contextlib.suppress(TrappmError):
        again = StepProfile.from_bytes(bytes(stored[:end]))
        # Only names, times and the like in the zip's directory were hit.
        assert again.memory(3) == profile.memory(3)


FAULTS = {
    "unknown kind": ("kinds", lambda a: np.where(a == 1, 9, a).astype(a.dtype)),
    "end once": ("kinds", lambda a: np.where(a == 3, 0, a).astype(a.dtype)),
    "numbered in the order": ("blocks", lambda a: a + np.int32(1)),
    "different lengths": ("blocks", lambda a: a[:-1]),
    "sizes of shape": ("sizes", lambda a: a.ravel()),
    "-1 or": ("sizes", lambda a: np.where(a == a.max(), -1, a)),
    "never allocated": ("gradients", lambda a: a + np.int32(100_000)),
    "freed within the step": ("gradients", lambda a: np.arange(len(a), dtype=a.dtype)),
    "batch sizes": ("numbers", lambda a: np.array([8, 8, *a[2:]])),
    "the numbers": ("numbers", lambda a: a[:3]),
    "is of type": ("sizes", lambda a: a.astype(np.float64)),
    "events, of at most": ("kinds", lambda a: np.zeros(1_000_001, np.int8)),
    "bytes, of at most": ("buffer_bytes", lambda a: np.zeros(4_000_000, np.int64)),
}


@pytest.mark.parametrize("reason", FAULTS)
def test_an_archive_that_contradicts_itself_is_refused_with_the_reason(profile, reason):
    name, damage = FAULTS[reason]
    arrays = arrays_of(profile.to_bytes())
    arrays[name] = damage(arrays[name])
    with pytest.raises(TrappmError, match=reason):
        StepProfile.from_bytes(archive_of(arrays))


def test_pickled_objects_are_never_loaded(profile):
    arrays = arrays_of(profile.to_bytes())
    arrays["blocks"] = np.array([{}] * len(arrays["kinds"]), dtype=object)
    with pytest.raises(TrappmError, match="is of type object"):
        StepProfile.from_bytes(archive_of(arrays))


def test_a_header_that_promises_a_giant_allocates_nothing(profile):
    """In a process of its own, which may not take a GiB more than it has."""
    content = io.BytesIO()
    header = {"descr": "|i1", "fortran_order": False, "shape": (1 << 40,)}
    np.lib.format.write_array_header_1_0(content, header)
    small = io.BytesIO(profile.to_bytes())
    bomb = io.BytesIO()
    with zipfile.ZipFile(small) as source, zipfile.ZipFile(bomb, "w") as target:
        for entry in source.infolist():
            giant = entry.filename == "kinds.npy"
            target.writestr(entry.filename, content.getvalue() if giant else source.read(entry))
    program = (
        "import resource, sys\n"
        "from trappm.profiler.simulation.step_profile import StepProfile\n"
        "from trappm.profiler.errors import TrappmError\n"
        "assert 'torch' not in sys.modules\n"
        "limit = 1 << 30\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "try: StepProfile.from_bytes(sys.stdin.buffer.read())\n"
        "except TrappmError as error: print(error)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], input=bomb.getvalue(), capture_output=True, check=True
    )
    assert b"damaged" in ran.stdout


def test_a_model_whose_step_cannot_be_traced_says_why():
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return (x.mean((2, 3)) if x.sum() > 0 else -x.mean((2, 3))) * self.weight

    with pytest.raises(
        UnsupportedModelError, match=r"cannot be traced: .* needs the values of a tensor \(aten::"
    ):
        step_profile(Picky(), 16)


class Untraceable(nn.Module):
    """Its graph is known; in training it asks for values."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.head(self.convolution(x).mean((2, 3)))
        if self.training and x.sum() > 0:
            x = -x
        return x


def test_a_model_whose_step_cannot_be_traced_has_no_simulated_memory_and_a_reason():
    profile = static_profile(Untraceable(), Sample((3, 8, 8), torch.float32))
    assert (profile.step, profile.step_source, profile.memory(4)) == (None, None, None)
    assert "cannot be traced" in profile.step_refusal
    with pytest.raises(InputError):
        profile.memory(0)
