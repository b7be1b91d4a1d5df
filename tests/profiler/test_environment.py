"""The environment record and the fingerprint; the command line that prints both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime, timedelta
from importlib.metadata import version
from pathlib import Path

import pytest
from fake_nvml import Board, install

from profiler.devices import open_device
from profiler.devices.cuda import CudaDevice
from profiler.environment import run_facts, stack_fingerprint, utc_now
from profiler.records import Configuration, Measurement, Outcome

CONFIGURATION = Configuration(
    architecture="mobilenetv3_small_050", batch_size=2, input_size=64, optimizer="adam"
)


def test_environment_names_the_stack_without_guessing() -> None:
    environment = open_device("cpu-1t").environment()
    assert environment["torch"] == version("torch")
    assert environment["timm"] == version("timm")
    assert environment["cpu_cores"] == os.cpu_count()
    assert environment["device_name"] == environment["cpu_model"] != ""
    json.dumps(environment)


def test_run_facts_say_how_it_computes() -> None:
    facts = run_facts(CONFIGURATION)
    assert facts["optimizer"] == "adam"
    assert facts["precision"] == "fp32"
    json.dumps(facts)


CUDA_FACTS = (
    "device_uuid", "device_name", "device_memory_mib", "ecc", "mig", "persistence",
    "device_power_limit_w", "driver", "cuda", "cudnn", "torch", "timm", "python", "tf32", "host",
    "code_version", "measuring_version", "cpu_model", "host_memory_mib",
)  # fmt: skip
RUN_FACTS = ("precision", "memory_format", "optimizer", "phase", "seed", "utc")
WINDOW_FACTS = (
    "sm_clock_mhz", "memory_clock_mhz", "temperature_c", "clock_event_reasons", "gpu_utilization",
    "memory_utilization", "power_method", "wall_step_time_ms", "foreign_gpu_processes",
)  # fmt: skip


def test_cuda_record_has_all_that_makes_a_label_comparable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, Board("GPU-a", energy_mj=[1, 1000]))
    device = open_device("cuda:0")
    assert isinstance(device, CudaDevice)
    device._strangers = {}  # as `prepare` leaves it, which needs CUDA
    environment = device.environment()
    assert set(CUDA_FACTS) <= environment.keys()
    assert set(RUN_FACTS) <= run_facts(CONFIGURATION).keys()
    device.open_window()
    facts = device.close_window().facts
    assert set(WINDOW_FACTS) <= facts.keys()
    json.dumps([environment, facts])


def test_now_is_utc() -> None:
    assert datetime.fromisoformat(utc_now()).utcoffset() == timedelta(0)


@pytest.mark.parametrize("fact", ["torch", "timm", "python", "device", "device_name", "driver"])
def test_fingerprint_changes_with_the_stack(fact: str) -> None:
    environment = open_device("cpu-1t").environment()
    assert stack_fingerprint({**environment, fact: "other"}) != stack_fingerprint(environment)


@pytest.mark.parametrize("fact", ["host", "kernel", "utc", "load_average_before", "lock_wait_s"])
def test_fingerprint_ignores_what_does_not_matter(fact: str) -> None:
    environment = open_device("cpu-1t").environment()
    assert stack_fingerprint({**environment, fact: "other"}) == stack_fingerprint(environment)


def profiler(*arguments: str, first_on_path: str = "") -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [first_on_path, *sys.path]))
    return subprocess.run(
        [sys.executable, "-m", "profiler", "measure", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


NOT_ON_A_GPU_NODE = ("ray", "sqlalchemy", "alembic", "pydantic", "pandas", "typer", "onnx_tool")


def test_command_prints_one_measurement_where_only_torch_and_timm_are(tmp_path: Path) -> None:
    # Every Python that is started, the fork server too, finds these packages missing.
    blocked = f"import sys\nsys.modules.update(dict.fromkeys({NOT_ON_A_GPU_NODE!r}))\n"
    (tmp_path / "sitecustomize.py").write_text(blocked, encoding="utf-8")
    done = profiler(
        CONFIGURATION.architecture,
        *("--batch-size", "2", "--input-size", "64", "--optimizer", "adam"),
        *("--device", "cpu-1t", "--protocol", "quick", "--json"),
        first_on_path=str(tmp_path),
    )
    assert done.stderr == ""
    measurement = Measurement.from_dict(json.loads(done.stdout))
    assert measurement.configuration == CONFIGURATION
    # Other work on this machine may rightly make it unstable.
    assert measurement.outcome in {Outcome.OK, Outcome.UNSTABLE}, measurement.message
    assert done.returncode == (0 if measurement.outcome is Outcome.OK else 1)
    assert measurement.step_samples_ms


@pytest.mark.parametrize(
    "arguments",
    [
        ("resnet18", "--device", "cpu-9999t"),
        ("resnet18", "--device", "cpu-1t", "--batch-size", "0"),
        ("resnet18", "--device", "cpu-1t", "--batch-size", "many"),
        ("resnet18", "--device", "cpu-1t", "--precision", "fp8"),
        ("resnet18",),
        ("resnet1888", "--device", "cpu-1t"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments: tuple[str, ...]) -> None:
    done = profiler(*arguments)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("profiler: ")
    assert "Traceback" not in done.stderr + done.stdout
