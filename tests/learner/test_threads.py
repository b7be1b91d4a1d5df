"""Heads side by side: the same results on any number of cores, errors raised, threads put back."""

import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits

from trappm.learner.heads.physics_heads import side_by_side


def blas_threads():
    return {lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas"}


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with threadpool_limits(2, "blas"):
        yield
    torch.set_num_threads(before)


def test_errors_are_raised_and_threads_restored(two_threads):
    seen = []

    def work(x):
        seen.append((torch.get_num_threads(), blas_threads()))
        if x == 1:
            raise ValueError("the second")
        return x

    with pytest.raises(ValueError, match="the second"):
        list(side_by_side(work, range(3)))
    assert all(threads == (1, {1}) for threads in seen)
    assert torch.get_num_threads() == 2
    assert blas_threads() == {2}
