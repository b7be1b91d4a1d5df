"""Power and energy of the shipped snapshot's answers, and what a power limit does to them."""

import pytest
from snapshot_samples import shipped_heads, snapshot_of

import trappm
from trappm.extensions.power_limits.step_power import MAX_SLOWDOWN
from trappm.profiler.errors import InputError

MODEL, BATCH = "resnet18", 64


def ask(device="v100", **fields):
    return trappm.predict(MODEL, batch_size=BATCH, device=device, **fields)


def test_power_and_energy_are_predicted_with_intervals():
    answer = ask(epochs=2, samples=6400, carbon_g_per_kwh=500)
    assert answer.energy_j == pytest.approx(answer.power_w * answer.step_time_ms / 1e3)
    for metric in ("power_w", "energy_j"):
        low, high = answer.intervals[metric]
        assert 0 < low < getattr(answer, metric) < high
        assert metric not in answer.missing
    assert 50 < answer.power_w < answer.intervals["power_w"][1] <= 300
    assert answer.run.energy_kwh == pytest.approx(200 * answer.energy_j / 3.6e6)
    assert "Zeus" in answer.power_source
    assert answer.power_limit_w is None
    # Nothing of this moves the time: it is the head's.
    low, high = answer.intervals["step_time_ms"]
    assert answer.intervals["samples_per_s"] == (1e3 * BATCH / high, 1e3 * BATCH / low)
    at_most = ask(power_limit_w=300)
    assert at_most.step_time_ms == pytest.approx(answer.step_time_ms, rel=1e-3)
    assert at_most.power_w == answer.power_w


def test_a_lower_power_limit_saves_energy_and_slows_steps():
    free, low, lowest = ask(), ask(power_limit_w=200), ask(power_limit_w=100)
    assert free.step_time_ms < low.step_time_ms < lowest.step_time_ms
    assert free.power_w > low.power_w > lowest.power_w
    assert low.power_w <= 200
    assert lowest.intervals["power_w"][1] <= 100.5
    assert low.energy_j < free.energy_j
    assert free.samples_per_s > low.samples_per_s
    assert low.samples_per_s == pytest.approx(1e3 * BATCH / low.step_time_ms)
    # Memory and the best limit do not depend on the limit of the question.
    assert (low.best_power_limit, low.memory_mib) == (free.best_power_limit, free.memory_mib)
    best = free.best_power_limit
    again = ask(power_limit_w=best.power_limit_w)
    assert again.energy_j == pytest.approx(best.energy_j, rel=1e-3)
    assert again.step_time_ms <= MAX_SLOWDOWN * free.step_time_ms * 1.001
    assert best.saved == pytest.approx(1 - best.energy_j / free.energy_j, rel=0.01)


@pytest.mark.parametrize(
    ("limit", "message"),
    [("200", "the power limit is '200'"), (float("nan"), "limit is nan"),
     (400, "400 W; this card has 75 to 300 W")],
)  # fmt: skip
def test_limits_outside_the_range_of_a_gpu_are_refused(limit, message):
    with pytest.raises(InputError, match=message):
        ask(power_limit_w=limit)


def test_devices_of_unknown_power_have_no_limit(tmp_path):
    folder = snapshot_of(tmp_path, {"cpu-2t": shipped_heads("v100-16gb")})
    answer = ask("cpu-2t", snapshot=folder)
    assert answer.power_w is answer.power_source is None
    assert "no model was trained on the power" in answer.missing["power_w"]
    with pytest.raises(InputError, match="nothing is known of the power of cpu-2t"):
        ask("cpu-2t", snapshot=folder, power_limit_w=100)
