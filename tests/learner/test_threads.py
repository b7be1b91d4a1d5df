"""Heads side by side: the same results on any number of cores, errors raised, threads put back."""

import threading

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


def test_threads_stay_limited_until_the_last_caller_ends(two_threads):
    both_run, first_ended = threading.Barrier(2), threading.Event()

    def first():
        list(side_by_side(lambda _: both_run.wait(20), [0]))
        first_ended.set()

    def second(_):
        both_run.wait(20)
        assert first_ended.wait(20)
        return torch.get_num_threads()

    thread = threading.Thread(target=first)
    thread.start()
    assert list(side_by_side(second, [0])) == [1]
    thread.join()
    assert blas_threads() == {2}
    assert torch.get_num_threads() == 2


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
