"""The campaign's state machine on a virtual cluster with faults, and single events by hand."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_cluster import Ledger, VirtualCluster, Weather, waiting

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
    Learned,
    Lost,
    Measure,
    Measured,
    Plan,
    Planned,
    Quarantine,
    Settled,
    Stopped,
    Tick,
    Worker,
)
from trappm.cluster.scheduler.queues import RESTART_S, WorkerTable
from trappm.cluster.scheduler.state_machine import Machine
from trappm.cluster.scheduler.stop_rules import Spend, Stop, StopRules
from trappm.profiler.records import Outcome

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
    assert not list(played.machine.leases())
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


def test_after_a_stop_rule_and_a_restart_planned_assignments_are_not_measured():
    held = {"waiting": [waiting("a100/2/0", "a100", 2, 0)], "next_rounds": {"a100": 3},
            "closed": [0, 1], "enough": True}  # fmt: skip
    desk = Desk(only([1, 4, 1, 4, 4]), [worker("one")], **held)
    assert not of(desk.commands, Measure) + of(desk.commands, Plan)
    assert [type(c) for c in desk.commands] == [Learn, Close]


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


def test_a_round_that_is_chosen_after_a_stop_rule_held_is_dropped():
    machine = Machine(only([0, 1, 5], quiet=True))
    sole_worker, now = worker("one"), 0.0
    orders = machine.handle(Joined(sole_worker), now)
    orders = machine.handle(Planned("a100", 0, []), now)
    orders = machine.handle(Planned("a100", 1, [waiting("x", "a100", 1, 0)]), now)
    assert of(orders, Measure) == [Measure(sole_worker, "x")]
    orders = machine.handle(Measured(sole_worker, "x", Outcome.OK, 1.0, True), now)
    assert of(orders, Learn)
    orders = machine.handle(Learned(True), now)
    assert of(orders, Plan) == [Plan("a100", 2, 5)]
    assert not machine.handle(Enough(), now)  # the learner cannot be interrupted
    assert not machine.handle(Planned("a100", 2, [waiting("y", "a100", 2, 0)]), now)
    assert machine.is_over


def test_a_stop_rule_ends_a_campaign_that_has_no_heads_yet():
    machine = Machine(only([1, 4, 4]))
    orders = machine.handle(Tick(), 0.0)
    orders = machine.handle(Planned("a100", 0, [waiting("x", "a100", 0, 0)]), 0.0)
    assert of(orders, Plan) == [Plan("a100", 1, 4)]
    assert machine.handle(Enough(), 1.0) == [Close(0)]
    orders = machine.handle(Planned("a100", 1, [waiting("y", "a100", 1, 0)]), 1.0)
    assert orders == [Learn(True)]
    assert not machine.handle(Learned(False), 2.0)
    assert machine.is_over


def test_a_budget_counts_running_measurements_and_leaves_room_for_retries():
    limited = Spend(rules=StopRules(labels=4))
    desk = Desk(only([2, 9]), [worker("one"), worker("two"), worker("three")], spend=limited)
    desk.measured("one")
    assert set(desk.doing()) == {"one", "two", "three"}
    assert not of(desk.measured("two"), Measure)  # two labels, and two that are to come
    orders = desk.measured("one", "error")
    assert len(of(orders, Measure)) == 1
    while desk.doing():
        desk.measured(next(iter(desk.doing())))
    assert of(desk.commands, BudgetSpent) == [
        BudgetSpent(Stop("labels", "4 of 4 labels are spent"))
    ]
    assert limited.labels == 4
    assert desk.machine.is_over


def test_a_time_budget_expects_running_measurements_to_take_the_mean_time():
    """Six measurements of a second fit; the two at the end of the fifth leave room for one."""
    limited = Spend(rules=StopRules(gpu_hours=6.5 / 3600))
    desk = Desk(only([1, 20]), [worker("one"), worker("two")], spend=limited)
    while desk.doing():
        desk.measured(next(iter(desk.doing())))
    assert limited.seconds == 6.0
    (spent,) = of(desk.commands, BudgetSpent)
    assert spent.stop.rule == "GPU-hours"


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


def test_a_budget_below_the_limit_of_one_measurement_is_used():
    limited = Spend(rules=StopRules(gpu_hours=3 / 3600), limit_s=40.0)
    desk = Desk(only([1, 50]), [worker("one"), worker("two")], spend=limited)
    assert set(desk.doing()) == {"one"}
    while desk.doing():
        desk.measured(next(iter(desk.doing())))
    assert limited.seconds == 3.0
    assert desk.machine.is_over


def test_settled_labels_count_in_a_budget():
    limited = Spend(rules=StopRules(labels=3))
    desk = Desk(only([2, 9]), [], spend=limited)
    desk.tell(Tick())
    desk.tell(Settled(["a100/0/0", "was settled as it was planned"]))
    desk.tell(Joined(worker("one")))
    desk.workers["one"] = worker("one")
    assert not of(desk.measured("one"), Measure)
    assert desk.machine.is_over


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


class Desk:
    """Hands events to a machine; the learner answers at once."""

    def __init__(self, plan, workers, **machine):
        self.machine = Machine(plan, **machine)
        self.now = 0.0
        self.commands = []
        self.workers = {w.name: w for w in workers}
        for worker in workers:
            self.tell(Joined(worker))

    def tell(self, event, after_s=0.0):
        self.now += after_s
        orders = self.machine.handle(event, self.now)
        answers = []
        for command in orders:
            self.commands.append(command)
            if isinstance(command, Plan):
                part = (command.device, command.round_number)
                ids = ["{}/{}/{}".format(*part, i) for i in range(command.count)]
                answers.append(Planned(*part, [waiting(x, *part, i) for i, x in enumerate(ids)]))
            elif isinstance(command, Learn):
                answers.append(Learned(True))
        for answer in answers:
            orders = orders + self.tell(answer)
        return orders

    def measured(self, name, outcome="ok"):
        """Ends what this worker is at; what is then commanded."""
        worker, result = self.workers[name], Outcome(outcome)
        return self.tell(
            Measured(worker, self.doing()[name], result, 1.0, result is Outcome.OK), 1.0
        )

    def doing(self):
        return {worker.name: assignment.id for worker, assignment in self.machine.leases()}


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


def test_a_single_worker_retries_its_own_failures():
    desk = Desk(only([1, 4]), [worker("one")])
    desk.measured("one", "unstable")
    assert desk.doing() == {"one": "a100/0/0"}


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


def test_a_timeout_is_retried_once():
    desk = Desk(only([1, 9]), [worker("one"), worker("two")])
    desk.measured("one", "timeout")
    assert not of(desk.commands, Quarantine)
    desk.measured("two", "ok")
    assert desk.doing()["two"] == "a100/0/0"
    orders = desk.measured("two", "timeout")
    assert len(of(orders, Quarantine)) == 1


@pytest.mark.parametrize("outcome", ["oom", "unsupported"])
def test_a_final_outcome_is_not_retried(outcome):
    desk = Desk(only([1, 9]), [worker("one")])
    desk.measured("one", outcome)
    assert desk.doing() == {"one": "a100/1/0"}


def test_a_joining_worker_gets_work_at_once():
    desk = Desk(only([1, 9]), [worker("one")])
    late = worker("late")
    assert of(desk.tell(Joined(late), 1.0), Measure) == [Measure(late, "a100/1/0")]


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


def test_a_restarted_worker_loses_its_measurement():
    desk = Desk(only([1, 9]), [worker("one")])
    orders = desk.tell(Joined(desk.workers["one"]))
    assert of(orders, GiveUp) == [GiveUp("a100/0/0", "it was restarted")]
    assert desk.doing() == {"one": "a100/0/0"}


def test_settled_assignments_are_not_measured():
    desk = Desk(only([2, 2]), [])
    desk.tell(Tick())
    desk.tell(Settled(["a100/0/0", "a100/0/1", "a100/1/0", "unknown"]))
    desk.tell(Joined(worker("one")))
    assert desk.doing() == {"one": "a100/1/1"}


def test_canaries_come_first_and_a_stopped_worker_measures_no_more():
    due = {"one", "two"}
    workers = [worker("one"), worker("two")]
    desk = Desk(only([1, 9]), workers, check_is_due=lambda w: w.name in due)
    assert {c.worker.name for c in of(desk.commands, CheckDevice)} == due
    due.clear()
    desk.tell(DeviceChecked(workers[0]))
    desk.tell(Stopped(workers[1]))
    desk.tell(DeviceChecked(workers[1]))
    assert desk.doing() == {"one": "a100/0/0"}
    desk.tell(Lost(workers[1], "restarted"))
    desk.tell(Joined(workers[1]))
    assert set(desk.doing()) == {"one"}


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
    machine = Machine(only([1, 4, 4]))
    now, orders = 0.0, []

    def tell(event):
        nonlocal orders
        orders = machine.handle(event, now)
        for command in orders:
            if isinstance(command, Plan):
                part = ("a100", command.round_number)
                tell(Planned(*part, [waiting(f"{part}{i}", *part, i) for i in range(4)]))

    sole_worker = worker("one")
    tell(Joined(sole_worker))
    learned = []
    for _ in range(8):
        ((_, running),) = machine.leases()
        tell(Measured(sole_worker, running.id, Outcome.OK, 1.0, True))
        if of(orders, Learn):
            learned.append(of(orders, Learn)[0].initial_ended)
            tell(Learned(False))
            if learned[-1]:
                break
    assert learned == [False, True]


def test_the_worker_that_waits_longest_is_next():
    first, second = worker("first"), worker("second")
    table = WorkerTable()
    table.join(first)
    table.join(second)
    table.begin(first, None)
    table.free(first)
    assert table.idle("a100") == [second, first]
