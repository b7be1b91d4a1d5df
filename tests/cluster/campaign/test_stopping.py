"""Stop rules: targets with confidence, budgets, deadlines and their forecast."""

import datetime

import numpy as np
import pytest

from trappm.cluster.campaign.rules import (
    forecast_end,
    stop_by_target,
    upper_bound,
)
from trappm.cluster.campaign.training import Judgement, Spent
from trappm.cluster.spec import StopRules

START = datetime.datetime(2026, 11, 21, 12, 0, tzinfo=datetime.UTC)


def judged(errors, architectures, device="a100"):
    return [
        Judgement(device=device, metric="step_time_ms", architecture=name, measured=100.0,
                  predicted=100.0 + error)
        for error, name in zip(errors, architectures, strict=True)
    ]  # fmt: skip


def result(mape, spread=0.0, device="a100"):
    """40 architectures with two labels each."""
    errors = np.repeat(mape + spread * np.linspace(-1, 1, 40), 2)
    return judged(errors.tolist(), [f"a{i // 2}" for i in range(80)], device)


def spent(labels):
    """A minute of measuring and of the clock for each label."""
    return Spent(labels, 60.0 * labels, START + datetime.timedelta(minutes=labels))


def target(mape):
    return {"target_mape": {"step_time_ms": mape}}


def test_a_target_must_be_reached_with_confidence_on_every_device():
    rules = StopRules(**target(5.0), confidence=0.95)
    assert stop_by_target(rules, result(4.9, spread=0.1), ["a100"]).rule == "target"
    assert stop_by_target(rules, result(4.9, spread=4.0), ["a100"]) is None
    assert stop_by_target(rules, result(5.1), ["a100"]) is None
    assert stop_by_target(rules, result(4.9), ["a100", "v100"]) is None
    both = result(4.9) + result(4.9, device="v100")
    assert stop_by_target(rules, both, ["a100", "v100"]).rule == "target"


@pytest.mark.parametrize("count", [3, 8])
def test_the_upper_bound_has_its_coverage_with_few_architectures(count):
    draw = np.random.default_rng(3)
    held = 0
    for _ in range(200):
        errors = np.exp(draw.normal(0.0, 0.8, count))
        mean = np.exp(0.32)
        held += upper_bound(judged(errors.tolist(), map(str, range(count))), 0.9) >= mean
    assert 0.8 <= held / 200 <= 0.99


def test_the_upper_bound_is_over_architectures_not_over_batch_sizes():
    """Ten labels of an architecture with equal errors count as one."""
    few = judged([3.0, 5.0, 7.0, 9.0], list("abcd"))
    copies = judged([3.0, 5.0, 7.0, 9.0] * 10, list("abcd") * 10)
    assert upper_bound(few, 0.9) == pytest.approx(upper_bound(copies, 0.9))
    assert upper_bound(judged([1.0, 1.1], ["resnet18"] * 2), 0.9) == np.inf


@pytest.mark.parametrize(
    ("rules", "rule"),
    [
        ({"labels": 60}, "labels"),
        ({"gpu_hours": 1.0}, "GPU-hours"),
        ({"ends_at": START + datetime.timedelta(hours=1)}, "clock"),
    ],
)
def test_the_end_of_a_budget_is_forecast(rules, rule):
    coming = forecast_end(StopRules(**rules), spent(20), spent(40), 900, ["a100"])
    assert coming.rule == rule
    assert coming.labels == pytest.approx(60)
    assert coming.at == START + datetime.timedelta(hours=1)
