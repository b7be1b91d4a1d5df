"""What every kind of device keeps, ours and a third party's: measured as users measure."""

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from trusting import TRUSTING

from trappm.cli.measure import summary
from trappm.profiler.devices import local_devices, open_device
from trappm.profiler.devices.gpu.cuda import CudaDevice
from trappm.profiler.errors import DeviceError
from trappm.profiler.host.environment import stack_fingerprint
from trappm.profiler.measuring.isolation import Measurer
from trappm.profiler.records import (
    METRICS,
    Configuration,
    Measurement,
    Outcome,
    Phase,
    Provenance,
)

ROOT = Path(__file__).parents[3]
TINY = Configuration(architecture="mobilenetv3_small_050", batch_size=2, input_size=64)


def add_package(folder, name, points):
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text(points, encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the recorded labels and the third party's package are; on everybody's path."""
    path = tmp_path_factory.mktemp("devices")
    label = {**TINY.to_dict(), "step_time_ms": 12.5, "memory_mib": 80.0}
    (path / "labels.jsonl").write_text(json.dumps(label) + "\n", encoding="utf-8")
    document = (ROOT / "docs" / "own_device.md").read_text(encoding="utf-8")
    code, points = (
        re.search(rf"```{kind}\n(.*?)```", document, re.DOTALL) for kind in ("python", "toml")
    )
    (path / "plain_device.py").write_text(code[1], encoding="utf-8")
    ini = points[1].replace('project.entry-points."trappm.devices"', "trappm.devices")
    add_package(path, "plain_device", ini.replace('"', ""))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path))
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        yield path


@pytest.fixture(scope="module")
def measurer(folder):
    with Measurer(lock_dir=folder / "locks") as measurer:
        yield measurer


KINDS = [
    "cpu-1t",
    "plain",
    "replay:FOLDER/labels.jsonl",
    "simulated:a100",
    pytest.param("cuda:0", marks=pytest.mark.gpu),
]


@pytest.fixture(params=KINDS)
def key(request, folder):
    key = request.param.replace("FOLDER", str(folder))
    if key == "cuda:0" and not CudaDevice.local_keys():
        pytest.skip("no NVIDIA GPU here")
    return key


def test_devices_describe_themselves(key):
    device = open_device(key)
    assert device.key == key
    environment = device.environment()
    json.dumps(environment)
    assert environment["device"] == key
    assert stack_fingerprint(open_device(key).environment()) == stack_fingerprint(environment)


@pytest.mark.parametrize("phase", list(Phase))
def test_devices_measure_a_step(key, phase, measurer, folder):
    configuration = replace(TINY, phase=phase)
    if key.startswith("replay:"):
        with (folder / "labels.jsonl").open("a", encoding="utf-8") as labels:
            labels.write(json.dumps({**configuration.to_dict(), "step_time_ms": 3.5}) + "\n")
    measurement = measurer.measure(configuration, key, TRUSTING)
    assert measurement.outcome is Outcome.OK, measurement.message
    assert measurement.device == key
    assert measurement.configuration == configuration
    step = measurement.step
    assert min(measurement.step_samples_ms) <= step.median_ms <= max(measurement.step_samples_ms)
    rate = 1000 * configuration.batch_size / step.median_ms
    assert measurement.samples_per_second == pytest.approx(rate)
    for metric in (*METRICS, "energy_j"):
        value = getattr(measurement, metric)
        assert (value is None) == (metric in measurement.missing)
        assert value is None or value > 0
    expected = {"replay": Provenance.IMPORTED, "simulated": Provenance.SIMULATED}
    assert measurement.provenance is expected.get(
        key.split(":", maxsplit=1)[0], Provenance.MEASURED
    )
    first_line = summary(measurement).splitlines()[0]
    assert ("not measured here" in first_line) == (
        measurement.provenance is not Provenance.MEASURED
    )
    shares = (step.forward_share, step.backward_share, step.optimizer_share)
    if phase is Phase.INFER or key.startswith("replay:"):
        assert shares == (None, None, None)
    else:
        assert sum(s for s in shares if s) == pytest.approx(1.0)
        assert all(s is not None and s > 0 for s in shares)
    assert Measurement.from_dict(json.loads(json.dumps(measurement.to_dict()))) == measurement


def test_unknown_models_are_unsupported(key, measurer):
    nobody = Configuration(architecture="resnet1888", batch_size=1, input_size=64)
    measurement = measurer.measure(nobody, key, TRUSTING)
    assert measurement.outcome is Outcome.UNSUPPORTED
    assert measurement.failed_in == ("measure" if key.startswith("replay:") else "create")
    assert "resnet1888" in measurement.message


def test_broken_third_party_devices_affect_only_themselves(folder, tmp_path, monkeypatch):
    add_package(tmp_path, "broken", "[trappm.devices]\nbroken = no_such_module:Device\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert {"cpu-1t", "plain"} <= set(local_devices())
    assert open_device("cpu-1t").key == "cpu-1t"
    with pytest.raises(DeviceError, match="'broken'"):
        open_device("broken:1")
