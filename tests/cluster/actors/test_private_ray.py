"""Isolation and cleanup of the private Ray of one machine."""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from trappm.cluster import ray_runtime

LOOK = """
import json, psutil
from trappm.cluster.ray_runtime import ray_runtime
with ray_runtime(None):
    import ray
    ray.get(ray.remote(lambda: None).remote())  # workers listen as well
    listen = [
        connection.laddr.ip
        for process in psutil.Process().children(recursive=True)
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    ]
    node = ray._private.worker.global_worker.node
    folder = node.get_session_dir_path()
    print(json.dumps([listen, folder]), flush=True)
    input()
"""


def _is_loopback(address):
    ip = ipaddress.ip_address(address)
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


@pytest.mark.slow
def test_the_private_ray_listens_on_loopback_and_its_folder_is_private_and_removed(tmp_path):
    """Also where the path of the folder of temporary files is too long for sockets."""
    temporary = tmp_path / ("x" * 60)
    temporary.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", LOOK], text=True, env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        listen, folder = json.loads(process.stdout.readline())
        assert listen
        assert [address for address in listen if not _is_loopback(address)] == []
        way = Path(folder).parents
        private = [f for f in way if f.name.startswith("trappm-ray-")]
        assert [f.stat().st_mode & 0o777 for f in private] == [0o700]
        process.communicate("\n")
    assert process.returncode == 0
    assert not private[0].exists()


def test_only_leftovers_of_ended_own_processes_are_removed(tmp_path, monkeypatch):
    gone = subprocess.Popen(["true"])
    gone.wait()
    monkeypatch.setattr(ray_runtime, "_temporary", lambda: tmp_path)
    own, running = tmp_path / f"trappm-ray-{gone.pid}-a", tmp_path / f"trappm-ray-{os.getpid()}-a"
    own.mkdir()
    running.mkdir()
    ray_runtime._remove_leftovers()
    assert list(tmp_path.iterdir()) == [running]
    own.mkdir()
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    killed = []
    monkeypatch.setattr(psutil.Process, "kill", killed.append)
    with (own / "log").open("w"):
        ray_runtime._remove_leftovers()
    assert own.exists()
    assert killed == []
