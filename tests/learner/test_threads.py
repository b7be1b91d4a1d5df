"""Heads side by side: the same results on any number of cores, errors raised, threads put back."""

import os
import threading

import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits

from trappm.learner.heads.device_heads import side_by_side


def blas_threads() -> set[int]:
    return {lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas"}


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with threadpool_limits(2, "blas"):
        yield
    torch.set_num_threads(before)


def test_results_stand_in_the_order_of_the_items():
    assert list(side_by_side(lambda x: x * x, range(9))) == [x * x for x in range(9)]


def test_products_have_one_thread_meanwhile_and_as_many_as_before_afterwards(two_threads):
    seen = list(side_by_side(lambda _: (torch.get_num_threads(), blas_threads()), range(4)))
    assert all(torch_threads == 1 and blas == {1} for torch_threads, blas in seen)
    assert torch.get_num_threads() == 2
    assert blas_threads() == {2}


def test_whoever_ends_first_puts_no_threads_back_that_another_still_holds(two_threads):
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


def test_an_error_is_raised_and_threads_are_put_back(two_threads):
    def work(x):
        if x == 1:
            raise ValueError("the second")
        return x

    with pytest.raises(ValueError, match="the second"):
        list(side_by_side(work, range(3)))
    assert torch.get_num_threads() == 2
    assert blas_threads() == {2}


def test_it_works_where_nobody_knows_the_number_of_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert list(side_by_side(str, [1, 2])) == ["1", "2"]
