"""The devices that answer without running anything: replay and simulated."""

import json
from dataclasses import replace

import pytest

from trappm.profiler.devices import open_device
from trappm.profiler.devices.catalogue import card_of
from trappm.profiler.errors import DeviceError, UnsupportedModelError
from trappm.profiler.records import (
    PAPER,
    Configuration,
    Execution,
    Measurement,
    Outcome,
    Precision,
    Provenance,
    StepSummary,
)

SIMULATED = ("a100", "t4")
CONFIGURATION = Configuration(architecture="test_resnet", batch_size=16, input_size=160)
STEP = StepSummary(median_ms=5.0, mean_ms=5.5, iqr_ms=1.0, p95_ms=8.0)


def measured(**changes):
    fields = {
        "configuration": CONFIGURATION,
        "device": "a100",
        "outcome": Outcome.OK,
        "protocol": PAPER,
        "started_at": "2026-11-21T00:00:00+00:00",
        "duration_s": 3.0,
        "step_samples_ms": (4.0, 5.0, 8.0),
        "step": STEP,
        "memory_mib": 900.0,
        "memory_detail_mib": {"capacity": 40000.0},
        "missing": {"power_w": "no meter"},
        "environment": {"device": "a100", "device_name": "NVIDIA A100", "torch": "2.6.0"},
    }
    return Measurement(**{**fields, **changes})


def answer(key, configuration=CONFIGURATION):
    return open_device(key).measure(configuration, PAPER, lambda phase: None)


def recorded(path, *records):
    file = path / "records.jsonl"
    lines = [r.to_dict() if isinstance(r, Measurement) else r for r in records]
    file.write_text("".join(f"{json.dumps(line)}\n\n" for line in lines), encoding="utf-8")
    return f"replay:{file}"


def test_replayed_measurements_are_complete(tmp_path):
    original = measured(provenance=Provenance.IMPORTED)
    unstable = measured(outcome=Outcome.UNSTABLE, memory_mib=1.0)
    measurement = answer(recorded(tmp_path, unstable, original, unstable))
    assert measurement.provenance is Provenance.IMPORTED
    assert measurement.step_samples_ms == original.step_samples_ms
    assert measurement.step == original.step
    assert measurement.memory_mib == 900.0
    assert measurement.missing == original.missing
    assert measurement.environment["torch"] == "2.6.0"
    assert measurement.environment["replayed_attempt"] == original.attempt_key
    assert measurement.environment["replayed_protocol"] == "paper"


def test_plain_labels_are_replayed_for_their_configuration_only(tmp_path):
    key = recorded(tmp_path, {**CONFIGURATION.to_dict(), "step_time_ms": 7.0, "id": 3})
    measurement = answer(key)
    assert measurement.step.median_ms == 7.0
    assert measurement.step_samples_ms == (7.0,)
    assert measurement.provenance is Provenance.IMPORTED
    assert set(measurement.missing) == {"memory_mib", "power_w", "energy_j"}
    with pytest.raises(UnsupportedModelError, match="no record of test_resnet batch 32"):
        answer(key, replace(CONFIGURATION, batch_size=32))
    recorded(tmp_path, {**CONFIGURATION.to_dict(), "step_time_ms": 8.25})
    assert answer(key).step_samples_ms == (8.25,)  # a changed file is read again


def test_records_of_two_stacks_are_refused(tmp_path):
    other = replace(CONFIGURATION, batch_size=1)
    environment = {**measured().environment, "torch": "2.7.0"}
    records = [measured(), measured(configuration=other, environment=environment)]
    with pytest.raises(DeviceError, match=r"line 3 .*torch '2.7.0' instead of '2.6.0'.*split"):
        open_device(recorded(tmp_path, *records))


LABEL = CONFIGURATION.to_dict()


@pytest.mark.parametrize(
    "line",
    ["{", "[" * 100_000, json.dumps(LABEL),
     json.dumps(measured(memory_mib=-1.0).to_dict()),
     json.dumps({**LABEL, "step_time_ms": "fast"})],
)  # fmt: skip
def test_invalid_lines_are_reported_by_number(line, tmp_path):
    good = json.dumps({**LABEL, "step_time_ms": 1.0})
    (tmp_path / "bad.jsonl").write_text(f"{good}\n{line}\n", encoding="utf-8")
    with pytest.raises(DeviceError, match=r"line 2 of bad\.jsonl"):
        open_device(f"replay:{tmp_path}/bad.jsonl")


def simulate(name, **changes):
    return answer(f"simulated:{name}", replace(CONFIGURATION, **changes))


def median(measurement):
    assert measurement.step is not None, measurement.message
    return measurement.step.median_ms


@pytest.mark.parametrize("name", SIMULATED)
def test_simulations_are_marked_and_plausible(name):
    measurement = simulate(name)
    assert measurement.provenance is Provenance.SIMULATED
    assert measurement.outcome is Outcome.OK
    card = card_of(name)
    assert card.power_w is not None
    assert 0 < measurement.power_w <= card.power_w
    assert measurement.energy_j == pytest.approx(measurement.power_w * median(measurement) / 1000)
    assert measurement.memory_mib < card.memory_gb * 1024
    environment = open_device(f"simulated:{name}").environment()
    assert "simulated" in environment["device_name"]
    assert environment["device_memory_mib"] == card.memory_gb * 1024


def test_bf16_of_old_gpus_and_compiled_steps_are_not_simulated():
    assert simulate("a100", precision=Precision.AMP_BF16).outcome is Outcome.OK
    with pytest.raises(UnsupportedModelError, match="bf16"):
        simulate("v100", precision=Precision.AMP_BF16)
    with pytest.raises(UnsupportedModelError, match="compiled"):
        simulate("a100", execution=Execution.COMPILE)


def test_steps_beyond_the_capacity_run_out_of_memory():
    measurement = simulate("t4", batch_size=1_000_000)
    assert measurement.outcome is Outcome.OOM
    assert measurement.memory_detail_mib["capacity"] == 16 * 1024
    assert measurement.provenance is Provenance.SIMULATED
    assert measurement.step is None
