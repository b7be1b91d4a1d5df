"""Pools and profiles on a running Ray cluster at `--address`."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.slow

HEAD = """
import sys, ray
ray.init(
    address="local", num_cpus=1, include_dashboard=False, object_store_memory=100 << 20,
    logging_level="ERROR", log_to_driver=False, _temp_dir=sys.argv[1],
    labels={"ray.io/accelerator-type": "V1000"},
)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""

CRASHES = """
import json, os, signal, sys
from trappm.cluster.ray_runtime import ray_runtime

def crash_on_vit(job):
    from trappm.cluster.profiles import profile_graph
    architecture, input_size, step_refusal = job
    if architecture == "test_vit" and (input_size == 64 or step_refusal is None):
        os.kill(os.getpid(), signal.SIGKILL)
    return [profile_graph(*job)]

with ray_runtime(sys.argv[1]):
    from trappm.cluster import profiles as profile_tasks
    profile_tasks._profile = crash_on_vit
    pairs = [("test_resnet", 64), ("test_vit", 64), ("test_vit", 96)]
    made = list(profile_tasks.profile_on_ray(pairs))
print(json.dumps({
    f"{p.architecture} {p.input_size}":
        [p.template is not None, p.refusal, p.step is not None, p.step_refusal]
    for p in made
}))
"""

TRACES = """
import json, os, signal, sys
from trappm.cluster.profiles import StepKey
from trappm.cluster.ray_runtime import ray_runtime
from trappm.profiler.records import MemoryFormat, Precision

def crash_on_fp16(keys):
    from trappm.cluster.profiles import trace_steps
    if any(key.precision == "amp-fp16" for key in keys):
        os.kill(os.getpid(), signal.SIGKILL)
    return trace_steps(keys)

keys = [StepKey("test_resnet", 64, precision, MemoryFormat.CONTIGUOUS, True)
        for precision in (Precision.FP32, Precision.AMP_FP16)]
keys.append(StepKey("test_no_such", 64, Precision.FP32, MemoryFormat.CONTIGUOUS, True))
with ray_runtime(sys.argv[1]):
    from trappm.cluster import profiles as profile_tasks
    profile_tasks.trace_steps = crash_on_fp16
    made = list(profile_tasks.trace_on_ray(keys))
print(json.dumps({
    f"{t.key.architecture} {t.key.precision}": [t.profile is not None, t.refusal] for t in made
}))
"""


ENVIRONMENT = """
import json, os, sys
from trappm.cluster.ray_runtime import ray_runtime

def return_environment(job):
    from trappm.cluster.profiles import ProfiledGraph
    return [ProfiledGraph(*job[:2], None, json.dumps(dict(os.environ)))]

with ray_runtime(sys.argv[1]):
    from trappm.cluster import profiles as profile_tasks
    profile_tasks._profile = return_environment
    made = list(profile_tasks.profile_on_ray([("test_resnet", size) for size in range(64, 72)]))
print(json.dumps([json.loads(p.refusal) for p in made]))
"""


@pytest.fixture(scope="module")
def environment():
    """What every process of the cluster needs in its environment before it imports Ray."""
    return os.environ | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "COLUMNS": "200",
    }


@pytest.fixture(scope="module")
def address(environment):
    # Sockets' paths may have 107 bytes, so the folder is a short one.
    with (
        tempfile.TemporaryDirectory(prefix="tr-", ignore_cleanup_errors=True) as folder,
        subprocess.Popen(
            [sys.executable, "-c", HEAD, folder], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        ) as head,
    ):  # fmt: skip
        yield head.stdout.readline().strip()
        head.communicate(timeout=60)  # the end of its input ends it


def test_a_pool_is_built_by_the_cluster_at_an_address(address, environment, tmp_path):
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump({"name": "small", "groups": [
        {"architectures": ["test_resnet", "test_vit"], "batch_sizes": [1, 2],
         "input_sizes": [64, 67]}
    ]}))  # fmt: skip

    def trappm(*arguments):
        return subprocess.run(
            [Path(sys.executable).with_name("trappm"), "pool", *arguments],
            env=environment | {"TRAPPM_HOME": str(tmp_path / "home")}, cwd=tmp_path,
            capture_output=True, text=True, check=False, timeout=250,
        )  # fmt: skip

    built = trappm("build", "--spec", "pool.yaml", "--address", address)
    assert built.returncode == 0, built.stderr
    assert "static profiles: 4 of 4" in built.stdout
    again = trappm("build", "--spec", "pool.yaml", "--address", address, "--json")
    facts = json.loads(again.stdout)
    assert facts["total"] == {
        "family": "all", "architectures": 2, "configurations": 8, "usable": 6, "graphs": 3,
        "step_profiles": 3,
        "refused": 1, "steps_refused": 0, "to_do": 0,
    }  # fmt: skip
    assert facts["refusals"][0]["architectures"] == ["test_vit"]


@pytest.fixture
def told_by(address, environment):
    """What a program that is given the cluster's address prints last, as JSON."""

    def run(code):
        result = subprocess.run(
            [sys.executable, "-c", code, address],
            env=environment, capture_output=True, text=True, check=False, timeout=250,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout.splitlines()[-1])

    return run


def test_a_model_that_kills_its_worker_affects_no_other_model(told_by):
    report = told_by(CRASHES)
    ended = "the static profile ended its process"
    assert report == {
        "test_resnet 64": [True, None, True, None],
        "test_vit 64": [False, ended, False, None],
        "test_vit 96": [True, None, False, ended],
    }


def test_a_trace_that_kills_its_worker_affects_its_own_precision_only(told_by):
    report = told_by(TRACES)
    assert report["test_resnet fp32"] == [True, ""]
    assert report["test_resnet amp-fp16"] == [False, "tracing its steps ended the process"]
    assert report["test_no_such fp32"][0] is False
    assert "test_no_such" in report["test_no_such fp32"][1]


def test_profile_tasks_have_no_secrets_in_their_environment(told_by, environment):
    seen = told_by(ENVIRONMENT)
    assert len(seen) == 8
    assert not any("RAY_AUTH_TOKEN" in each for each in seen)
    assert all(environment["RAY_AUTH_TOKEN"] not in each.values() for each in seen)


def test_a_cluster_lists_the_gpus_of_its_nodes(told_by):
    code = (
        "import json, sys; from trappm.cluster.ray_runtime import gpus_known_to;"
        "print(json.dumps(sorted(gpus_known_to(sys.argv[1]))))"
    )
    report = told_by(code)
    assert {"v1000", "a10g", "h100", "rtx-pro-6000"} <= set(report)  # a node's; by name
    assert "a1000" not in report
