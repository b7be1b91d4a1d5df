"""What a campaign does next, by what SQL says: pure functions, without Ray, SQL and clocks."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from trappm.cluster.campaign.rules import (
    CampaignPlan,
    Choose,
    Close,
    LearnerState,
    MakePool,
    Need,
    Prepare,
    Publish,
    Train,
    count_waiting,
    due_before,
    may_measure,
    most_workers,
    next_job,
    stop_that_holds,
)
from trappm.cluster.spec import StopRules
from trappm.store import CampaignState
from trappm.store.records import Pending, Purpose, RoundRecord, Standing

NOW = datetime(2026, 11, 29, tzinfo=UTC)
CPU = CampaignPlan(devices=("cpu",), shares={"cpu": [3, 4, 2, 2]}, one_at_a_time=True)
CPU_2T = replace(CPU, devices=("cpu-2t",), shares={"cpu-2t": [3, 4, 2, 2]})
GPUS = CampaignPlan(
    devices=("a100", "v100"), shares={"a100": [3, 4, 2, 2], "v100": [2, 2, 1, 1]},
    one_at_a_time=False, traces_elsewhere=True,
)  # fmt: skip
READY = LearnerState(is_ready=True)


def planned(number, closed=False, **devices):
    purpose = [*Purpose][min(number, 2)]
    report = {} if closed else None
    return RoundRecord(
        campaign_id="c", number=number, purpose=purpose, planned=devices, report=report
    )


def standing(*rounds, pending=(), **changes):
    fields = {
        "state": CampaignState.RUNNING, "rounds": rounds, "attempts": {}, "seconds": {},
        "measured": {}, "labels": 0, "has_pool": True, "is_enough": False,
    }  # fmt: skip
    return Standing(pending=[Pending(*part) for part in pending], **(fields | changes))


def trained(state, **changes):
    """The learner after a training on all that has ended."""
    return replace(READY, **({"ended_at_training": state.ended, "has_heads": True} | changes))


def job(state, plan=CPU, learner=READY, workers=None):
    return next_job(state, plan, learner, workers or {})


def test_the_pool_comes_first_then_the_encoder_then_the_evaluation_set():
    assert job(standing(has_pool=False)) == MakePool()
    assert job(standing(), learner=LearnerState()) == Prepare()
    assert job(standing()) == Choose("cpu", 0, 3)


def test_round_0_needs_no_encoder_where_other_nodes_trace():
    unprepared = LearnerState()
    assert job(standing(), GPUS, unprepared) == Choose("a100", 0, 3)
    first = standing(planned(0, a100=3), pending=[("a100", 0, 3, 0)])
    assert job(first, GPUS, unprepared) == Choose("v100", 0, 2)
    both = standing(planned(0, a100=3, v100=2), pending=[("a100", 0, 0, 3), ("v100", 0, 1, 1)])
    assert job(both, GPUS, unprepared) == Prepare()


def test_the_evaluation_set_is_closed_without_a_training():
    assert job(standing(planned(0, cpu=3))) == Close(0)
    at_work = standing(planned(0, cpu=3), pending=[("cpu", 0, 0, 1)])
    assert job(at_work) == Choose("cpu", 1, 4)


def test_one_thing_at_a_time_on_cpus():
    rounds = planned(0, closed=True, cpu=3), planned(1, cpu=4)
    for part in [("cpu", 1, 2, 0), ("cpu", 1, 0, 1)]:
        assert job(standing(*rounds, pending=[part])) is None
    done = standing(*rounds)
    assert job(done) == Train(is_last_chance=True)
    assert job(done, learner=trained(done)) == Close(1)
    closed = standing(rounds[0], planned(1, closed=True, cpu=4))
    assert job(closed, learner=trained(closed)) == Choose("cpu", 2, 2)


def test_what_failed_is_due_a_round_later_and_not_waited_for():
    rounds = planned(0, closed=True, cpu=3), planned(1, cpu=4)
    failed = standing(*rounds, pending=[("cpu", 2, 1, 0)])
    assert due_before(failed, CPU, READY, "cpu") == 2
    assert count_waiting(failed, CPU, READY) == {}
    assert job(failed) == Train(is_last_chance=False)
    assert job(failed, learner=trained(failed)) == Close(1)


def test_without_heads_what_was_put_off_is_measured_before_the_last_training():
    rounds = planned(0, closed=True, cpu=3), planned(1, cpu=4)
    failed = standing(*rounds, pending=[("cpu", 2, 1, 0)])
    lacking = trained(failed, has_heads=False)
    assert due_before(failed, CPU, lacking, "cpu") is None
    assert count_waiting(failed, CPU, lacking) == {"cpu": 1}
    assert job(failed, learner=lacking) is None
    ended = standing(*rounds)
    assert job(ended, learner=lacking) == Train(is_last_chance=True)


def test_on_gpus_the_learner_runs_ahead():
    rounds = planned(0, closed=True, a100=3, v100=2), planned(1, a100=4, v100=2)
    workers = {"a100": 2, "v100": 1}
    measured = {"attempts": {"a100": 5, "v100": 2}, "seconds": {"a100": 50.0, "v100": 20.0}}
    many = standing(*rounds, pending=[("a100", 1, 3, 1), ("v100", 1, 2, 0)], **measured)
    assert job(many, GPUS, READY, workers) is None  # 15 s of work, and training takes 0
    slow = replace(READY, training_s=10.0)
    assert job(many, GPUS, slow, workers) is None  # too few labels to choose by
    some = standing(*rounds, pending=[("a100", 1, 1, 1), ("v100", 1, 2, 0)], **measured)
    assert job(some, GPUS, slow, workers) == Train(is_last_chance=False)
    after = trained(many, training_s=10.0, ended_at_training=many.ended - 1, may_choose=True)
    assert job(many, GPUS, after, workers) == Choose("a100", 2, 2)
    assert job(many, GPUS, replace(after, may_choose=False), workers) == Train(False)


def test_rounds_close_in_order():
    rounds = planned(0, closed=True, a100=3, v100=2), planned(1, a100=4, v100=2)
    rounds = *rounds, planned(2, a100=2, v100=1), planned(3, a100=2, v100=1)
    begun = standing(*rounds, pending=[("v100", 1, 0, 1)])
    assert job(begun, GPUS, trained(begun)) is None  # rounds 2 and 3 have ended
    ended = standing(*rounds)
    assert job(ended, GPUS, trained(ended)) == Close(1)


def all_closed():
    return standing(*(planned(n, closed=True, cpu=share) for n, share in enumerate([3, 4, 2, 2])))


def test_it_is_published_once_all_rounds_are_closed_and_heads_know_all():
    over = all_closed()
    assert job(over) == Train(is_last_chance=True)  # heads do not outlive the learner's process
    assert job(over, learner=trained(over)) == Publish()


def test_a_learner_that_has_failed_does_nothing_more():
    failed = LearnerState(is_ready=True, has_failed=True)
    assert job(all_closed(), learner=failed) is None
    assert job(standing(planned(0, cpu=3)), learner=failed) == Close(0)


def test_what_failed_is_measured_again_after_a_learner_that_plans_no_other_round():
    rounds = planned(0, closed=True, cpu=3), planned(1, cpu=4)
    state = standing(*rounds, pending=[("cpu", 2, 1, 0)])
    failed = replace(trained(state), has_failed=True)
    assert due_before(state, CPU, failed, "cpu") is None
    assert count_waiting(state, CPU, failed) == {"cpu": 1}


def test_once_a_rule_holds_only_what_runs_is_waited_for():
    rounds = planned(0, closed=True, cpu=3), planned(1, cpu=4)
    enough = standing(*rounds, pending=[("cpu", 1, 3, 1)], is_enough=True)
    assert count_waiting(enough, CPU, READY) == {}
    assert job(enough) is None
    rest = standing(*rounds, pending=[("cpu", 1, 3, 0)], is_enough=True)
    assert job(rest) == Train(is_last_chance=False)
    assert job(rest, learner=trained(rest, has_heads=False)) == Close(1)
    closed = standing(
        rounds[0], planned(1, closed=True, cpu=4), pending=[("cpu", 1, 3, 0)], is_enough=True
    )
    assert job(closed, learner=trained(closed, has_heads=False)) == Publish()


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({"labels": 60}, "60 of 60 labels are spent"),
        ({"gpu_hours": 1.0}, "1 of 1 CPU-hours are spent"),
    ],
)
def test_a_budget_is_spent_exactly(rules, reason):
    plan = replace(CPU_2T, rules=StopRules(**rules))
    spent = {"labels": 59, "attempts": {"cpu-2t": 59}, "seconds": {"cpu-2t": 59 * 60.0}}
    before = standing(**spent)
    assert may_measure(before, plan)
    assert may_measure(before, plan, begun=1) == ("labels" not in rules)  # runs count as labels
    assert stop_that_holds(before, plan, NOW) is None
    running = standing(labels=57, pending=[("cpu-2t", 1, 0, 3)])
    assert may_measure(running, plan) == ("labels" not in rules)
    after = standing(labels=60, attempts={"cpu-2t": 60}, seconds={"cpu-2t": 3600.0})
    assert stop_that_holds(after, plan, NOW).reason == reason


def test_hours_of_gpus_are_counted_without_those_of_cpus():
    plan = CampaignPlan(
        devices=("cpu-2t", "a100"), shares={"cpu-2t": [3, 4], "a100": [2, 2]}, one_at_a_time=True,
        rules=StopRules(gpu_hours=1.0),
    )  # fmt: skip
    attempts = {"cpu-2t": 9, "a100": 2}
    before = standing(attempts=attempts, seconds={"cpu-2t": 9 * 3600.0, "a100": 1800.0})
    assert may_measure(before, plan)
    after = standing(attempts=attempts, seconds={"cpu-2t": 9 * 3600.0, "a100": 3600.0})
    assert stop_that_holds(after, plan, NOW).reason == "1 of 1 GPU-hours are spent"


@pytest.mark.parametrize(
    ("mine", "others", "gpus", "most"),
    [
        (Need(40, 8, 16), [], 8, 16),
        (Need(40, 8, 16), [Need(40, 0, 16)], 8, 4),  # one gives up as many as the other lacks
        (Need(40, 8, 16), [Need(40, 0, 2)], 8, 6),
        (Need(40, 6, 16), [Need(40, 2, 2)], 8, 16),  # it has all that it may have
        (Need(40, 0, 16), [Need(40, 8, 16)], 8, 16),  # the one that waits may take what is free
        (Need(40, 8, 16), [Need(0, 0, 16)], 8, 16),  # no work waits there
        (Need(40, 3, 16), [Need(40, 0, 16)], 0, 16),  # how many there are is not known yet
    ],
)
def test_gpus_are_shared_between_campaigns(mine, others, gpus, most):
    assert most_workers(mine, others, gpus) == most
