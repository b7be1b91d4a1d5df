"""Figures of a campaign as somebody scrapes them from Ray's metrics port."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

SCRAPE = """
import contextlib, os, socket, time, urllib.request
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0"}
import ray
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False,
         _metrics_export_port=port, object_store_memory=80 << 20)
from trappm.cluster.campaign.actor import CampaignMetrics
metric = CampaignMetrics("1a2b")
for _ in range(3):
    metric("labels", "a100", 1)
metric("losses", "a100", 1)
metric("queue", "a100", 40)
metric("busy_share", "a100", 0.75)
deadline = time.monotonic() + 90
text = ""
while "trappm_busy_share" not in text and time.monotonic() < deadline:
    time.sleep(1.0)
    with contextlib.suppress(OSError):  # it is not up yet
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
print("\\n".join(line for line in text.splitlines() if "trappm_" in line))
"""


def test_figures_of_a_campaign_are_scraped():
    pytest.importorskip("aiohttp_cors", reason="ray[default] is not installed: it has the exporter")
    result = subprocess.run(
        [sys.executable, "-c", SCRAPE],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sys.path))},
        capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    found = {
        match[1]: float(match[2])
        for line in result.stdout.splitlines()
        if (match := re.match(r'ray_trappm_(\w+)\{.*Device="a100".*\} ([\d.]+)', line, re.I))
    }
    assert found["busy_share"] == 0.75, result.stdout
    assert found["labels_total"] == 3
    assert found["losses_total"] == 1
    assert found["queue"] == 40
