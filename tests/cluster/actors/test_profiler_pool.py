"""The pool of profiler actors on a real Ray cluster, without a campaign: who joins and who leaves.

Each is a program of its own (`pool_scenarios`), since Ray reads its environment at its import.
"""

from __future__ import annotations

from functools import partial

import pytest

from trappm.cluster.actors.profiler_pool import RECRUIT_S, REFUSED_S, pause_after


def test_the_pause_between_failed_starts_grows_to_a_limit():
    assert [pause_after(n) for n in (1, 2, 3)] == [2 * RECRUIT_S, 4 * RECRUIT_S, 8 * RECRUIT_S]
    assert pause_after(7) == pause_after(5_000) == REFUSED_S  # as it is after some days


@pytest.fixture
def play(play):
    return partial(play, "pool_scenarios.py")


@pytest.mark.slow
def test_a_task_for_a_worker_that_has_just_ended_is_lost(play):
    """Between two looks at the workers the campaign may still think that it is there."""
    assert play("gone_already") == {
        "losses": [["the profiler was gone already", True]],
        "again": [],
    }


@pytest.mark.slow
def test_dismissing_a_worker_of_a_lost_node_leaves_no_demand_behind(play):
    assert play("dismissed_after_its_node") == {"demands": []}


@pytest.mark.slow
def test_a_gpu_without_work_is_released_after_a_while(play):
    assert play("given_back") == {
        "while_work_waits": 2,
        "free_then": 0,
        "free_at_last": 2,
    }


@pytest.mark.slow
def test_a_gpu_that_is_for_another_campaign_is_given_back(play):
    assert play("surplus") == {"free": 1}


@pytest.mark.slow
def test_as_many_more_gpus_are_asked_for_as_have_work(play):
    assert play("asked_by_need") == {"asked": [4, 2, 0]}


@pytest.mark.slow
def test_a_profiler_that_cannot_start_is_reported_and_joins_once_it_can(play):
    result = play("mended")
    first, second, *_ = result["messages"]
    assert "No module named 'timm'" in first
    assert "the next one is started in 2 s" in first
    assert "the next one is started in 4 s" in second
    assert result["awaited"] == ["simulated:a100"]
    assert result["joined"] == 1


@pytest.mark.slow
def test_a_profiler_that_cannot_start_ends_a_campaign_on_a_single_machine(play):
    result = play("broken_here")
    assert result["error"].startswith("the profiler of simulated:a100 cannot be started: ")
    assert "No module named 'timm'" in result["error"]
