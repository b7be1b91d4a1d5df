"""The environment record and the fingerprint; the command line that prints both."""

import json
import os
import subprocess
import sys
from importlib.metadata import version

import pytest
from fake_cuda import install_cuda, prepared
from nvml_stub import Board, install

from trappm.profiler.devices import open_device
from trappm.profiler.host.environment import run_facts, stack_difference, stack_fingerprint
from trappm.profiler.records import Configuration, Measurement, Outcome

CONFIGURATION = Configuration(
    architecture="mobilenetv3_small_050", batch_size=2, input_size=64, optimizer="adam"
)


def test_the_environment_names_the_software_stack():
    environment = open_device("cpu-1t").environment()
    assert environment["torch"] == version("torch")
    assert environment["timm"] == version("timm")
    assert environment["cpu_cores"] == os.cpu_count()
    assert environment["device_name"] == environment["cpu_model"] != ""
    json.dumps(environment)


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


def test_gpu_measurements_record_the_facts_that_make_them_comparable(monkeypatch):
    install(monkeypatch, Board("GPU-a", energy_mj=[1, 1000]))
    install_cuda(monkeypatch)
    device = prepared("cuda:0", monkeypatch)
    environment = device.environment()
    assert set(CUDA_FACTS) <= environment.keys()
    assert set(RUN_FACTS) <= run_facts(CONFIGURATION).keys()
    device.open_window(lambda: None)
    facts = device.close_window().facts
    assert set(WINDOW_FACTS) <= facts.keys()
    json.dumps([environment, facts])


STACK = ("torch", "timm", "python", "device", "device_name", "driver")
CHANGING = ("host", "kernel", "utc", "load_average_before", "lock_wait_s")


def test_the_fingerprint_changes_with_the_stack_only():
    environment = open_device("cpu-1t").environment()
    for fact in (*STACK, *CHANGING):
        other = stack_fingerprint({**environment, fact: "other"})
        assert (other == stack_fingerprint(environment)) == (fact in CHANGING), fact


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "ONEDNN_MAX_CPU_ISA"])
def test_relevant_environment_variables_change_the_stack(name, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    before = open_device("cpu-1t").environment()
    monkeypatch.setenv(name, "1")
    after = open_device("cpu-1t").environment()
    assert after["switches"][name] == "1"
    assert stack_fingerprint(after) != stack_fingerprint(before)
    assert name in (stack_difference(before, after) or "")


def on_a_gpu(monkeypatch, **board):
    install(monkeypatch, Board("GPU-a", "Tesla T4", **board))
    return open_device("cuda:0").environment()


def test_ecc_clock_and_host_change_the_stack_of_a_gpu(monkeypatch):
    plain = on_a_gpu(monkeypatch)
    assert stack_difference(plain, on_a_gpu(monkeypatch)) is None
    for other in (
        on_a_gpu(monkeypatch, ecc=(0, 1)),
        on_a_gpu(monkeypatch, application_clock_mhz=585),
        {**plain, "host_cpu": "a slower one"},
    ):
        assert stack_fingerprint(other) != stack_fingerprint(plain)


def test_another_memory_method_is_another_stack():
    environment = open_device("cpu-1t").environment()
    usual = {**environment, "memory_method": "nvml process memory"}
    other = {**environment, "memory_method": "nvml device memory above its baseline"}
    assert stack_fingerprint(other) != stack_fingerprint(usual)
    assert "memory_method" in (stack_difference(other, usual) or "")
    # What a device says before it measures, and a run that came to no memory, are of the usual one.
    untold = {k: v for k, v in environment.items() if k != "memory_method"}
    assert stack_fingerprint(usual) == stack_fingerprint(untold)
    assert stack_fingerprint({**usual, "memory_method": "none"}) == stack_fingerprint(untold)


NOT_ON_A_GPU_NODE = ("ray", "sqlalchemy", "alembic", "pandas", "onnx_tool")


def test_measure_needs_neither_ray_nor_sql(tmp_path):
    # Every Python that is started, the fork server too, finds these packages missing.
    blocked = f"import sys\nsys.modules.update(dict.fromkeys({NOT_ON_A_GPU_NODE!r}))\n"
    (tmp_path / "sitecustomize.py").write_text(blocked, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", "from trappm.cli import main; main()", "measure",
         CONFIGURATION.architecture, "--batch-size", "2", "--input-size", "64",
         "--optimizer", "adam", "--device", "cpu-1t", "--protocol", "quick", "--json"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    measurement = Measurement.from_dict(json.loads(done.stdout))
    assert measurement.configuration == CONFIGURATION
    # Other work on this machine may rightly make it unstable.
    assert measurement.outcome in {Outcome.OK, Outcome.UNSTABLE}, measurement.message
    assert done.returncode == (0 if measurement.outcome is Outcome.OK else 1)
    assert measurement.step_samples_ms
    assert measurement.environment["samples_per_second"] == measurement.samples_per_second
