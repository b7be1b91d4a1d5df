"""Stop rules: a target needs its confidence, near is not there, the first to come is told."""

import datetime
from dataclasses import replace

import numpy as np
import pytest

from trappm.cluster.scheduler.stop_rules import (
    Judged,
    RoundResult,
    StopRules,
    foretold,
    labels_to,
    overspent,
    past,
    stopped,
    upper_bound,
)
from trappm.profiler.errors import InputError

SERIES = ("a100", "step_time_ms")
START = datetime.datetime(2026, 11, 21, 12, 0, tzinfo=datetime.UTC)


def generator():
    return np.random.default_rng(0)


def result(labels, mape, spread=0.0, minutes=None):
    """40 architectures with two labels each, a minute of measuring and of the clock a label."""
    errors = np.repeat(mape + spread * np.linspace(-1, 1, 40), 2)
    minutes = labels if minutes is None else minutes
    return RoundResult(
        labels=labels,
        gpu_seconds=60.0 * labels,
        ended_at=START + datetime.timedelta(minutes=minutes),
        judged={SERIES: Judged(errors.tolist(), [f"a{i // 2}" for i in range(80)])},
    )


def ended(rules, rounds, devices=("a100",)):
    return stopped(rules, rounds, devices, generator())


def target(mape):
    return {"target_mape": {"step_time_ms": mape}}


def test_a_target_is_reached_only_with_its_confidence():
    rules = StopRules(**target(5.0), confidence=0.95)
    assert ended(rules, [result(10, 4.9, spread=0.1)]).rule == "target"
    assert ended(rules, [result(10, 4.9, spread=4.0)]) is None
    assert ended(rules, [result(10, 5.1)]) is None


@pytest.mark.parametrize("count", [3, 8])
def test_the_bound_holds_as_often_as_it_says_even_from_few_architectures(count):
    draw = np.random.default_rng(3)
    held = 0
    for _ in range(200):
        errors = np.exp(draw.normal(0.0, 0.8, count))
        judged = Judged(errors.tolist(), [str(at) for at in range(count)])
        held += upper_bound(judged, 0.9, draw) >= np.exp(0.32)  # their mean
    assert 0.8 <= held / 200 <= 0.99


def test_one_architecture_does_not_tell_that_a_target_is_reached():
    assert upper_bound(Judged([1.0, 1.1], ["resnet18"] * 2), 0.9, generator()) == np.inf


def test_a_target_has_to_be_reached_on_every_device():
    one = result(10, 4.9)
    assert ended(StopRules(**target(5.0)), [one], ("a100", "v100")) is None
    both = replace(one, judged={**one.judged, ("v100", "step_time_ms"): one.judged[SERIES]})
    assert ended(StopRules(**target(5.0)), [both], ("a100", "v100")).rule == "target"


def test_the_bound_is_over_architectures_not_over_their_near_copies():
    """Ten labels of each architecture that err alike tell no more than one."""
    few = Judged([3.0, 5.0, 7.0, 9.0], list("abcd"))
    copies = Judged([3.0, 5.0, 7.0, 9.0] * 10, list("abcd") * 10)
    assert upper_bound(few, 0.9, generator()) == pytest.approx(
        upper_bound(copies, 0.9, generator())
    )


def test_a_plateau_is_rounds_without_progress():
    rules = StopRules(plateau_rounds=2)
    falling = [result(10 * (i + 1), m) for i, m in enumerate((9.0, 7.0, 6.0, 5.0))]
    assert ended(rules, falling) is None
    flat = [*falling, result(50, 5.0), result(60, 4.95)]
    assert ended(rules, flat).rule == "plateau"
    assert ended(rules, flat[:-1]) is None
    # An error that still falls, or that is judged for the first time, is progress.
    other = ("a100", "memory_mib")
    falls = [
        replace(r, judged={**r.judged, other: result(1, 9.0 / (i + 1)).judged[SERIES]})
        for i, r in enumerate(flat)
    ]
    assert ended(rules, falls) is None
    assert ended(rules, [*flat[:-1], falls[-1]]) is None


@pytest.mark.parametrize(
    ("rules", "rule"),
    [
        ({"labels": 60}, "labels"),
        ({"gpu_hours": 1.0}, "GPU-hours"),
        ({"money": 3.0, "price_per_gpu_hour": 3.0}, "money"),
        ({"ends_at": START + datetime.timedelta(hours=1)}, "clock"),
    ],
)
def test_the_end_of_a_budget_is_foretold(rules, rule):
    rounds = [result(20, 9.0), result(40, 8.0)]
    assert ended(StopRules(**rules), rounds) is None
    coming = foretold(StopRules(**rules), rounds, 900)
    assert coming.rule == rule
    assert coming.labels == pytest.approx(60)
    assert coming.at == START + datetime.timedelta(hours=1)


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        ({"labels": 60}, "60 of 60 labels are spent"),
        ({"gpu_hours": 1.0}, "1 of 1 GPU-hours are spent"),
        ({"money": 3.0, "price_per_gpu_hour": 3.0}, "3 of 3 money are spent"),
        ({"money": 9.0, "price_per_gpu_hour": 3.0, "gpu_hours": 1.0}, "1 of 1 GPU-hours are spent"),
    ],
)
def test_a_budget_is_spent_to_its_last_part_and_no_further(rules, told):
    rules = StopRules(**rules)
    assert overspent(rules, 59, 3540.0, 1, 60.0) is None
    assert overspent(rules, 60, 3600.0, 1, 60.0).told == told


def test_time_that_is_left_but_too_short_for_one_more_is_told():
    stop = overspent(StopRules(gpu_hours=10.0), 50, 9.5 * 3600, 1, 0.75 * 3600)
    assert stop.told == "9.5 of 10 GPU-hours are spent, and one more measurement takes about 0.75"


def test_the_clock_is_a_rule():
    rules = StopRules(ends_at=START)
    assert past(rules, START - datetime.timedelta(seconds=1)) is None
    assert past(rules, START).rule == "clock"
    assert past(StopRules(labels=1), START) is None


def test_labels_to_a_target_follow_the_power_law():
    rounds = [result(n, 40.0 * n**-0.5) for n in (25, 50, 100)]
    assert labels_to({"step_time_ms": 2.0}, rounds) == pytest.approx(400)
    assert labels_to({"step_time_ms": 2.0}, rounds[:2]) is None
    assert labels_to({"step_time_ms": 0.001}, rounds) is None
    assert labels_to({"step_time_ms": 2.0}, [result(n, 5.0) for n in (25, 50, 100)]) is None
    assert labels_to({}, rounds) is None


def test_the_first_rule_to_come_is_told():
    rounds = [result(n, 40.0 * n**-0.5) for n in (25, 50, 100)]
    assert foretold(StopRules(**target(2.0), labels=200), rounds, 900).rule == "labels"
    assert foretold(StopRules(**target(2.0), labels=900), rounds, 900).rule == "target"
    assert foretold(StopRules(labels=900), rounds[:1], 900) is None


@pytest.mark.parametrize("rules", [{"gpu_hours": 1e9}, {"labels": 10**13}])
def test_a_limit_beyond_any_calendar_is_not_what_comes_first(rules):
    rounds = [result(n, 5.0) for n in (25, 50)]
    assert foretold(StopRules(**rules), rounds, 400).rule == "rounds"


def test_without_rules_the_last_round_ends_a_campaign():
    rounds = [result(n, 5.0) for n in (25, 50, 100)]
    coming = foretold(StopRules(), rounds, 400)
    assert (coming.rule, coming.labels) == ("rounds", 400)
    assert coming.at == START + datetime.timedelta(minutes=400)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"labels": 0}, "labels is 0"),
        ({"confidence": 1.0}, "between 0.5 and 1"),
        ({"plateau_share": 1.0}, "between 0 and 1"),
        ({"target_mape": {"memory": 5.0}}, "no metric 'memory'"),
        ({"target_mape": {"memory_mib": 0.0}}, "must be positive"),
        ({"money": 5.0}, "needs price_per_gpu_hour"),
        ({"ends_at": datetime.datetime(2026, 1, 1)}, "time zone"),
    ],
)
def test_rules_that_cannot_be_are_refused(rules, message):
    with pytest.raises(InputError, match=message):
        StopRules(**rules)
