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

from trappm.profiler.models.own_modules import with_version

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[3] / "examples"
"""Folder of a package that the nodes have, and the commands have not."""

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
from trappm.profiler.records import Precision
from trappm.profiler.traced_step import TraceSettings
from trappm.profiler.traced_step import TraceKey

def crash_on_fp16(key):
    from trappm.cluster.trace_tasks import entry_to_bytes, trace_of
    if key.settings.precision == "amp-fp16":
        os.kill(os.getpid(), signal.SIGKILL)
    traced = trace_of(key)
    return entry_to_bytes(traced.made), traced.is_final

half = TraceSettings(precision=Precision.AMP_FP16)
keys = [TraceKey("test_resnet", 64), TraceKey("test_resnet", 64, half)]
keys.append(TraceKey("test_no_such", 64))
with ray_runtime(sys.argv[1]):
    from trappm.cluster import trace_tasks
    trace_tasks._trace_to_bytes = crash_on_fp16
    made = list(trace_tasks.TraceTasks(keys))
print(json.dumps({str(t): [t.has_graph, t.refusal, t.is_final] for t in made}))
"""


ENVIRONMENT = """
import json, os, sys
from trappm.cluster.ray_runtime import ray_runtime
from trappm.profiler.traced_step import TraceKey

def return_environment(key):
    from trappm.cluster.trace_tasks import Traced
    from trappm.profiler.traced_step import Refusal
    return Traced(key, Refusal(json.dumps(dict(os.environ))))

def make_in_return_environment(key):
    from trappm.cluster import trace_tasks
    trace_tasks.trace_of = return_environment
    return trace_tasks._trace_to_bytes(key)

with ray_runtime(sys.argv[1]):
    from trappm.cluster import trace_tasks
    trace_tasks._trace_to_bytes = make_in_return_environment
    made = list(trace_tasks.TraceTasks([TraceKey("test_resnet", size) for size in range(64, 72)]))
print(json.dumps([json.loads(t.refusal) for t in made]))
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
            [sys.executable, "-c", HEAD, folder], text=True,
            env=environment | {"PYTHONPATH": f"{environment['PYTHONPATH']}:{EXAMPLES}"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        ) as head,
    ):  # fmt: skip
        yield head.stdout.readline().strip()
        head.communicate(timeout=60)  # the end of its input ends it


def test_a_pool_is_built_by_the_cluster_at_an_address(address, environment, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    own = with_version("my_models.vision:plain_net")  # the command below cannot import it
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump({"name": "small", "groups": [
        {"architectures": ["test_resnet", "test_vit"], "batch_sizes": [1, 2],
         "input_sizes": [64, 67]},
        {"architectures": [own], "batch_sizes": [1], "input_sizes": [64]},
    ]}))  # fmt: skip

    def trappm(*arguments):
        return subprocess.run(
            [Path(sys.executable).with_name("trappm"), "pool", *arguments],
            env=environment | {"TRAPPM_HOME": str(tmp_path / "home")}, cwd=tmp_path,
            capture_output=True, text=True, check=False, timeout=250,
        )  # fmt: skip

    built = trappm("build", "--spec", "pool.yaml", "--address", address)
    assert built.returncode == 0, built.stderr
    assert "traced steps: 5 of 5" in built.stdout
    again = trappm("build", "--spec", "pool.yaml", "--address", address, "--json")
    facts = json.loads(again.stdout)
    assert facts["total"] == {
        "family": "all", "architectures": 3, "configurations": 9, "usable": 7, "steps": 5,
        "traced": 4, "refused": 1, "steps_refused": 0, "to_do": 0,
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


def test_a_trace_that_kills_its_worker_affects_itself_only(told_by):
    report = told_by(CRASHES)
    unknown = report.pop("test_no_such at 64 px")
    has_graph, refusal, is_final = report.pop("test_resnet at 64 px, amp-fp16")
    assert (has_graph, is_final) == (False, False)
    assert refusal.startswith("tracing it ended 3 processes (")
    assert report == {"test_resnet at 64 px": [True, None, True]}
    assert (unknown[0], unknown[2]) == (False, True)
    assert "test_no_such" in unknown[1]


def test_tasks_have_no_secrets_in_their_environment(told_by, environment):
    seen = told_by(ENVIRONMENT)
    assert len(seen) == 8
    assert not any("RAY_AUTH_TOKEN" in each for each in seen)
    assert all(environment["RAY_AUTH_TOKEN"] not in each.values() for each in seen)
