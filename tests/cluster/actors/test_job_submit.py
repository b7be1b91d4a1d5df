"""A campaign that is launched by `ray job submit`, and goes on after the job has ended."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import yaml

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PLAN = {
    "name": "tiny", "devices": {"source": "simulated:a100"}, "protocol": "quick", "canary": False,
    "evaluation": {"source": 3, "architecture_share": 0.3}, "initial": {"source": 6},
    "rounds": {"count": 1, "source": 2},
    "pool": {"groups": [{
        "architectures": ["test_resnet", "test_vit", "test_efficientnet", "test_convnext"],
        "batch_sizes": [1, 2, 4], "input_sizes": [64],
    }]},
}  # fmt: skip
RAY = Path(sys.executable).with_name("ray")
TRAPPM = 'exec {} -c "from trappm.cli import main; main()" "$@"\n'


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@pytest.fixture
def cluster(tmp_path):
    """A head with its job server: an environment for its clients."""
    pytest.importorskip("aiohttp_cors", reason="ray[default] is not installed: it has the jobs")
    (tmp_path / "home").mkdir()
    script = tmp_path / "trappm"
    script.write_text("#!/bin/sh\n" + TRAPPM.format(sys.executable))
    script.chmod(0o755)
    port, jobs = free_port(), free_port()
    environment = os.environ | {
        "PATH": os.pathsep.join([str(tmp_path), str(RAY.parent), os.environ["PATH"]]),
        "PYTHONPATH": str(Path(__file__).resolve().parents[3]),
        "TRAPPM_HOME": str(tmp_path / "home"),
        "RAY_AUTH_MODE": "disabled",  # everything listens on loopback, for a minute
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ADDRESS": f"127.0.0.1:{port}",
    }
    with tempfile.TemporaryDirectory(prefix="tr-", ignore_cleanup_errors=True) as folder:
        head = subprocess.Popen(
            [RAY, "start", "--head", "--block", f"--port={port}", "--node-ip-address=127.0.0.1",
             "--num-cpus=2", "--num-gpus=0", f"--dashboard-port={jobs}", f"--temp-dir={folder}",
             "--dashboard-host=127.0.0.1", f"--object-store-memory={100 << 20}"],
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline:
                with (
                    contextlib.suppress(OSError),
                    socket.create_connection(("127.0.0.1", jobs), timeout=1),
                ):
                    break
                time.sleep(0.5)
            yield environment, f"http://127.0.0.1:{jobs}"
        finally:
            head.terminate()
            head.wait(60)


def test_a_campaign_outlives_the_job_that_launched_it(cluster, tmp_path):
    environment, address = cluster
    sent = tmp_path / "sent"  # to the cluster, as from a machine that shares no disk with it
    sent.mkdir()
    (sent / "tiny.yaml").write_text(yaml.safe_dump(PLAN))
    deadline = time.monotonic() + 240
    while True:
        submitted = subprocess.run(
            [RAY, "job", "submit", "--address", address, "--working-dir", str(sent), "--",
             "trappm", "campaign", "launch", "tiny.yaml", "--address", "auto", "--detach"],
            env=environment, capture_output=True, text=True, check=False, timeout=240,
        )  # fmt: skip
        if "No available agent" not in submitted.stderr or time.monotonic() > deadline:
            break
        time.sleep(2.0)  # the head is still starting
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    assert "continues on the cluster" in submitted.stdout

    def campaign():
        shown = subprocess.run(
            [tmp_path / "trappm", "campaign", "status", "--json"],
            env=environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return json.loads(shown.stdout)[0]

    deadline = time.monotonic() + 240
    while campaign()["state"] != "finished" and time.monotonic() < deadline:
        time.sleep(2.0)
    assert (campaign()["state"], campaign()["labels"]) == ("finished", 11)
