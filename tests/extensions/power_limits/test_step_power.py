"""Power and energy of steps: what they are made of, and what a power limit does to them."""

import numpy as np
import pytest
from power_steps import steps_of, traced_workloads

from trappm.extensions.power_limits.step_power import power_of
from trappm.learner.physics.power import CONSTANTS
from trappm.profiler.devices.catalogue import card_of, cards


@pytest.fixture(scope="module")
def workloads():
    return traced_workloads()


def test_a_lower_power_limit_reduces_power_and_slows_steps(workloads):
    steps, time_ms = steps_of(workloads)
    limits = np.arange(260.0, 60.0, -20.0)
    points = [steps.under(np.full(len(workloads), limit)) for limit in limits]
    power = np.array([point.power_w for point in points])
    times = np.array([point.time_ms for point in points])
    assert np.all(np.diff(power, axis=0) <= 1e-6)
    assert np.all(np.diff(times, axis=0) >= -1e-6)
    assert np.all(power <= limits[:, None] * 1.001)
    # The time under the limit that was given is what was given.
    assert steps.under(np.full(len(workloads), 250.0)).time_ms == pytest.approx(time_ms, rel=0.01)
    free = steps.under(np.full(len(workloads), 1e4))
    assert np.all(free.clock == 1.0)
    assert free.power_w == pytest.approx(steps.at(np.ones(len(workloads)))[0])


def test_waiting_steps_draw_little_more_than_idle_power(workloads):
    steps, _ = steps_of(workloads, slower=50.0)
    idle = 250 * steps.values[CONSTANTS.index("idle")]
    under = steps.under(np.full(len(workloads), 250.0))
    assert np.all((idle < under.power_w) & (under.power_w < 1.35 * idle))
    # A limit costs it no time: the device has time enough.
    slow = steps.under(np.full(len(workloads), 100.0))
    assert slow.time_ms == pytest.approx(under.time_ms, rel=0.01)


def test_known_power_states_its_source_and_uncertainty():
    v100, a40 = power_of(card_of("v100-16gb")), power_of(card_of("a40"))
    assert (v100.limit_w, v100.sheet.power_w) == (300, 250)
    assert "Zeus" in v100.rests_on
    assert "this card's limit of" in a40.rests_on
    for name in ("idle", "full", "bytes"):
        at = CONSTANTS.index(name)
        assert a40.constants.covariance[at, at] > 4 * v100.constants.covariance[at, at]
    assert power_of(None) is power_of(card_of("a100-mig-1g.5gb")) is None
    for card in cards():
        known = power_of(card)
        assert (known is None) == (card.power_w is None)
        assert known is None or np.isfinite(np.linalg.cholesky(known.constants.covariance)).all()
