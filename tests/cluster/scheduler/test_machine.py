"""The campaign's state machine on a virtual cluster with faults, and single events by hand."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_cluster import Desk, Ledger, VirtualCluster, Weather

from trappm.cluster.scheduler.messages import (
    BudgetSpent,
    CheckDevice,
    Close,
    Course,
    DeviceChecked,
    Enough,
    GiveUp,
    Joined,
    Learn,
    Lost,
    Measure,
    Quarantine,
    Settled,
    Tick,
    Worker,
)
from trappm.cluster.scheduler.queues import RESTART_S, WorkerTable
from trappm.cluster.scheduler.stop_rules import Spend, StopRules

TWO = ("a100", "v100")


def course(shares=None, *, devices=TWO, quiet=False, max_attempts=3):
    shares = shares or {device: [4, 6, 5, 5, 5] for device in devices}
    return Course(
        devices=tuple(devices), shares=shares, max_attempts=max_attempts,
        keeps_host_quiet=quiet,
    )  # fmt: skip


def play(plan, workers, weather=None, seed=1, rules=None):
    generator = np.random.default_rng(seed)
    ledger = Ledger(rules=rules)
    return VirtualCluster(plan, workers, weather or Weather(), generator, ledger=ledger).run()


@st.composite
def campaigns(draw):
    devices = TWO[: draw(st.integers(1, 2))]
    rounds = draw(st.integers(2, 5))
    sizes = st.lists(st.integers(0, 12), min_size=rounds, max_size=rounds)
    return course(
        {device: draw(sizes) for device in devices},
        devices=devices,
        quiet=draw(st.booleans()),
        max_attempts=draw(st.integers(1, 4)),
    )


weathers = st.builds(
    Weather,
    measuring_s=st.sampled_from([0.1, 5.0, 300.0]),
    learning_s=st.sampled_from([0.0, 20.0, 2000.0]),
    failing=st.sampled_from([0.0, 0.1, 0.4]),
    killing=st.sampled_from([0.0, 0.1, 0.3]),
    freezing=st.sampled_from([0.0, 0.1, 0.2]),
    poisoned=st.sampled_from([0.0, 0.2, 1.0]),
    joining_s=st.sampled_from([1.0, 500.0]),
    enough_after=st.sampled_from([1, 2, 3, np.inf]),
    time_is_up_s=st.sampled_from([0.0, 50.0, 2000.0, np.inf, np.inf]),
)
budgets = st.one_of(
    st.none(),
    st.builds(StopRules, labels=st.integers(1, 60)),
    st.builds(StopRules, gpu_hours=st.sampled_from([1e-5, 0.01, 0.3, 2.0])),
)
groups = st.tuples(st.integers(1, 4), st.integers(1, 3))


def is_well(plan, played):
    """What must be true of every campaign that has come to its end."""
    ledger = played.ledger
    assert played.machine.is_over
    assert set(ledger.state.values()) <= {"done", "failed"} | ({"open"} if ledger.enough else set())
    assert not ledger.holder
    assert not list(played.machine.workers.leases())
    by_part = {(d, n): share for d in plan.devices for n, share in enumerate(plan.shares[d])}
    if ledger.enough:  # what was planned before, and nothing afterwards
        assert sorted(ledger.closed) == sorted({number for _, number in ledger.planned})
        assert ledger.planned.items() <= by_part.items()
    else:
        assert sorted(ledger.closed) == list(range(plan.rounds))
        assert ledger.planned == Counter(by_part)  # all of the budget, and no more
    assert all(ledger.starts[id_] <= plan.max_attempts for id_ in ledger.state)
    assert set(ledger.quarantined) == {x for x, state in ledger.state.items() if state == "failed"}
    if ledger.rules and ledger.rules.labels:
        assert ledger.labels <= ledger.rules.labels
        if ledger.enough == "labels":
            assert ledger.labels == ledger.rules.labels
    if ledger.rules and ledger.rules.gpu_hours:
        budget_s = 3600 * ledger.rules.gpu_hours * (1 + 1e-6)
        assert ledger.seconds <= budget_s + played.workers * ledger.longest_s
    return True


@settings(deadline=None, max_examples=250)
@given(campaigns(), st.lists(groups, min_size=2, max_size=2), weathers, st.integers(0, 99), budgets)
def test_every_campaign_ends_and_every_assignment_once(plan, sizes, weather, seed, rules):
    played = play(plan, dict(zip(plan.devices, sizes, strict=False)), weather, seed, rules)
    assert is_well(plan, played)
    goes_wrong = weather.failing or weather.killing or weather.freezing or weather.poisoned
    is_ended = min(weather.enough_after, weather.time_is_up_s) < np.inf
    if rules and rules.labels and not goes_wrong and not is_ended:  # spent to the last label
        assert played.ledger.labels == min(rules.labels, sum(map(sum, plan.shares.values())))


@settings(deadline=None, max_examples=100)
@given(
    campaigns(), st.lists(groups, min_size=2, max_size=2), weathers, st.integers(0, 99),
    st.lists(st.floats(1, 2000), min_size=1, max_size=3), budgets,
)  # fmt: skip
def test_a_campaign_killed_at_any_moment_goes_on_from_its_ledger(
    plan, sizes, weather, seed, lives, rules
):
    workers = dict(zip(plan.devices, sizes, strict=False))
    generator = np.random.default_rng(seed)
    played = VirtualCluster(plan, workers, weather, generator, ledger=Ledger(rules=rules))
    for life in lives:
        played.run(until_s=life)
        if played.machine.is_over:
            break
        done = [id_ for id_, state in played.ledger.state.items() if state == "done"]
        before = {id_: played.ledger.starts[id_] for id_ in done}
        played.ledger.starts.clear()  # an interruption is no failure, and no failure is remembered
        machine = played.ledger.resumed(plan)
        ledger = played.ledger
        played = VirtualCluster(
            plan, workers, weather, np.random.default_rng(seed + 1), machine, ledger
        )
        played.run(until_s=0.0)
        assert not set(before) & set(ledger.starts)
    assert is_well(plan, played.run())


@pytest.mark.parametrize(
    ("seconds", "limit", "first", "used"),
    [
        (6.5, {}, 2, 6.0),  # the two at the end of the fifth second leave room for one
        (3, {"limit_s": 40.0}, 1, 3.0),  # less than a measurement may take
    ],
)
def test_a_time_budget_expects_running_measurements_to_take_the_mean_time(
    seconds, limit, first, used
):
    limited = Spend(rules=StopRules(gpu_hours=seconds / 3600), **limit)
    desk = Desk(only([1, 20]), [worker("one"), worker("two")], spend=limited)
    assert len(desk.doing()) == first
    while desk.doing():
        desk.measured(next(iter(desk.doing())))
    assert limited.seconds == used
    (spent,) = of(desk.commands, BudgetSpent)
    assert spent.stop.rule == "GPU-hours"
    assert desk.machine.is_over


def test_first_measurements_are_expected_to_take_their_time_limit():
    workers = [worker(str(i)) for i in range(9)]
    limited = Spend(rules=StopRules(gpu_hours=100 / 3600), limit_s=40.0)
    desk = Desk(only([1, 50]), workers, spend=limited)
    assert set(desk.doing()) == {"0", "1"}
    assert desk.machine.to_come["a100"]  # the others stay
    desk.tell(Lost(workers[0], "killed"))
    assert set(desk.doing()) == {"1", "2"}
    desk.measured("1")  # in a second
    assert len(desk.doing()) == 8


def test_settled_assignments_are_not_measured_and_count_in_a_budget():
    desk = Desk(only([2, 9]), [], spend=Spend(rules=StopRules(labels=5)))
    desk.tell(Tick())
    desk.tell(Settled(["a100/0/0", "a100/0/1", "a100/1/0", "unknown"]))
    desk.workers["one"] = worker("one")
    desk.tell(Joined(desk.workers["one"]))
    assert desk.doing() == {"one": "a100/1/1"}
    assert not of(desk.measured("one"), Measure)
    assert desk.machine.is_over


def test_after_a_stop_rule_running_measurements_are_learned_and_no_more_begin():
    desk = Desk(only([1, 4, 4]), [worker("one"), worker("two")])
    assert desk.doing() == {"one": "a100/0/0", "two": "a100/1/0"}
    assert not desk.tell(Enough())
    assert not desk.machine.to_come["a100"]
    assert not of(desk.measured("one"), Measure)
    assert desk.doing() == {"two": "a100/1/0"}
    orders = desk.measured("two", "unstable")  # another chance would be a beginning
    assert [type(c) for c in orders] == [Learn, Close]
    assert of(desk.commands, Close) == [Close(0), Close(1)]


def test_a_stop_rule_ends_a_campaign_that_has_no_heads_yet():
    desk = Desk(only([1, 4, 4]), [], learns=lambda order: False)
    desk.tell(Tick())
    assert not of(desk.commands, Learn)
    desk.tell(Enough())
    assert desk.learned == [False]
    assert desk.machine.is_over
    assert of(desk.commands, Close) == [Close(0), Close(1)]


def test_gpus_do_not_wait_for_the_learner():
    plan = course({"a100": [100, 100] + [200] * 20, "v100": [50, 50] + [100] * 20})
    weather = Weather(failing=0.02, killing=0.003, freezing=0.001, poisoned=0.002)
    played = play(plan, {"a100": (4, 4), "v100": (2, 4)}, weather)
    for device in plan.devices:
        share = played.idle_s[device] / (played.idle_s[device] + played.busy_s[device])
        assert share < 0.02, device
    assert is_well(plan, played)


def test_a_slow_node_delays_only_its_own_measurements():
    plan = course({"a100": [40, 40] + [80] * 4}, devices=["a100"])
    slow = play(plan, {"a100": (4, 1)}, Weather(slow_host="a100-0"))
    alone = play(plan, {"a100": (3, 1)})  # the three that are as they should be
    assert is_well(plan, slow)
    assert slow.time_s < 1.1 * alone.time_s  # in equal parts it would be three times as much


def test_rounds_shorter_than_a_training_are_planned_ahead():
    plan = course({"a100": [20, 100] + [20] * 100}, devices=["a100"])
    played = play(plan, {"a100": (4, 4)}, Weather(measuring_s=10.0, learning_s=100.0))
    assert played.idle_s["a100"] / played.busy_s["a100"] < 0.2
    assert is_well(plan, played)


# By hand, one event at a time.


def worker(name, device="a100", host=None):
    return Worker(name, device, host or name, "stack")


def only(shares, **changes):
    return course({"a100": shares}, devices=["a100"], **changes)


def of(commands, kind):
    return [command for command in commands if isinstance(command, kind)]


def test_a_failed_assignment_goes_to_another_host_after_the_rest_of_its_round():
    desk = Desk(only([2, 4]), [worker("one"), worker("two")])
    assert desk.doing() == {"one": "a100/0/0", "two": "a100/0/1"}
    desk.measured("one", "error")
    assert desk.doing()["one"] == "a100/1/0"  # its own failure is not for it
    desk.measured("two")
    assert desk.doing()["two"] == "a100/0/0"
    alone = Desk(only([1, 4]), [worker("one")])
    alone.measured("one", "unstable")
    assert alone.doing() == {"one": "a100/0/0"}


def test_an_assignment_that_kills_workers_is_quarantined_after_three_hosts():
    workers = [worker(str(i), host=f"host{i // 2}") for i in range(8)]
    desk = Desk(only([1, 50]), workers)
    died_on = []
    for _ in range(3):
        (name,) = [name for name, id_ in desk.doing().items() if id_ == "a100/0/0"]
        died_on.append(desk.workers[name].host)
        orders = desk.tell(Lost(desk.workers[name], "killed"))
        assert of(orders, GiveUp) == [GiveUp("a100/0/0", "killed")]
        for other in list(desk.doing()):
            if "a100/0/0" not in desk.doing().values():
                desk.measured(other)
    assert len(set(died_on)) == 3
    (abandoned,) = of(desk.commands, Quarantine)
    assert (abandoned.assignment.id, abandoned.failures) == ("a100/0/0", 3)
    assert abandoned.hosts == tuple(died_on)


def test_a_timeout_is_retried_once_and_a_final_outcome_never():
    desk = Desk(only([1, 9]), [worker("one"), worker("two")])
    desk.measured("one", "timeout")
    assert not of(desk.commands, Quarantine)
    desk.measured("two", "ok")
    assert desk.doing()["two"] == "a100/0/0"
    orders = desk.measured("two", "timeout")
    assert len(of(orders, Quarantine)) == 1
    for outcome in ("oom", "unsupported"):
        desk = Desk(only([1, 9]), [worker("one")])
        desk.measured("one", outcome)
        assert desk.doing() == {"one": "a100/1/0"}


def test_a_joining_worker_gets_work_at_once_and_loses_what_it_had():
    desk = Desk(only([1, 9]), [worker("one")])
    late = worker("late")
    assert of(desk.tell(Joined(late), 1.0), Measure) == [Measure(late, "a100/1/0")]
    alone = Desk(only([1, 9]), [worker("one")])
    orders = alone.tell(Joined(alone.workers["one"]))
    assert of(orders, GiveUp) == [GiveUp("a100/0/0", "it was restarted")]
    assert alone.doing() == {"one": "a100/0/0"}


def test_a_failed_assignment_waits_a_limited_time_for_a_restarting_host():
    desk = Desk(only([2, 9]), [worker("one"), worker("two")])
    desk.tell(Lost(desk.workers["two"], "killed"))
    desk.measured("one", "error")
    assert desk.doing()["one"] == "a100/0/1"
    desk.measured("one")
    assert desk.doing()["one"] == "a100/1/0"  # what it failed is for the other host
    desk.tell(Joined(desk.workers["two"]))
    assert desk.doing()["two"] == "a100/0/0"
    desk.tell(Lost(desk.workers["two"], "killed"))
    for _ in range(int(RESTART_S)):
        desk.tell(Tick(), 1.0)
    desk.measured("one")
    assert desk.doing()["one"] == "a100/0/0"  # nobody has come


def test_canaries_come_first_and_a_stopped_worker_measures_nothing_until_it_joins_again():
    due, stopped = {"one", "two"}, set()
    workers = [worker("one"), worker("two")]
    desk = Desk(only([1, 9]), workers, check_is_due=lambda w: w.name in due, stopped=stopped)
    assert {c.worker.name for c in of(desk.commands, CheckDevice)} == due
    due.clear()
    desk.tell(DeviceChecked(workers[0]))
    stopped.add(workers[1])
    desk.tell(DeviceChecked(workers[1]))
    assert desk.doing() == {"one": "a100/0/0"}
    desk.tell(Lost(workers[1], "set aside"))
    assert set(desk.doing()) == {"one"}
    stopped.clear()
    desk.tell(Joined(workers[1]))
    assert set(desk.doing()) == {"one", "two"}


def test_devices_without_workers_are_reported_when_nothing_else_runs():
    plan = course({"a100": [1, 4], "v100": [1, 4]})
    desk = Desk(plan, [worker("one")])
    assert desk.machine.stalled() == set()
    while desk.doing():
        desk.measured("one")
    assert desk.machine.stalled() == {"v100"}
    desk.tell(Joined(worker("two", "v100")))
    assert desk.machine.stalled() == set()


def test_without_heads_the_learner_waits_for_the_whole_initial_round():
    desk = Desk(only([1, 4, 4]), [worker("one")], learns=lambda order: order.initial_ended)
    while desk.doing() and desk.learned[-1:] != [True]:
        desk.measured("one")
    assert desk.learned == [False, True]


def test_the_worker_that_waits_longest_is_next():
    first, second = worker("first"), worker("second")
    table = WorkerTable(stopped=())
    table.join(first)
    table.join(second)
    table.begin(first, None)
    table.free(first)
    assert table.idle("a100") == [second, first]
