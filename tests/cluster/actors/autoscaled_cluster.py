"""A Ray cluster on this machine whose nodes an autoscaler starts and ends, as `ray up` has it.

The autoscaler is Ray's own, of version 2, with the node types of `ray_config.yaml`; what it starts
are Ray's fake nodes, processes of this machine. Import it in programs of their own only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import psutil
import ray
import yaml
from emulated_cluster import ROOT

from trappm.cluster.ray_runtime import ACCELERATOR_LABEL, NAMESPACE

HEAD_ID = "f" * 51 + "00000"
PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
NEEDED_LISTS = (
    "initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands",
    "head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files",
)  # fmt: skip
IDLE_S = 6.0
STORE = 80 << 20


def config(address):
    """What the autoscaler is told: the types of `ray_config.yaml`, on fake nodes with one core."""
    shipped = yaml.safe_load((ROOT / "ray_config.yaml").read_text())
    types = {
        name: {
            "resources": {"CPU": 1, "object_store_memory": STORE, "GPU": kind["resources"]["GPU"]},
            "node_config": {},
            **{key: kind[key] for key in ("labels", "min_workers", "max_workers")},
        }
        for name, kind in shipped["available_node_types"].items()
        if name != shipped["head_node_type"]
    }
    head = {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0}
    return {
        **{key: [] for key in NEEDED_LISTS},
        **{key: {} for key in ("auth", "docker", "file_mounts")},
        "cluster_name": "autoscaled",
        "max_workers": shipped["max_workers"],
        "upscaling_speed": shipped["upscaling_speed"],
        "idle_timeout_minutes": IDLE_S / 60,
        "head_node_type": "ray.head.default",
        "available_node_types": {**types, "ray.head.default": head},
        "provider": {
            "type": "external",  # the defaults of the fake provider are missing from Ray's wheel
            "module": PROVIDER,
            "gcs_address": address,
            "head_node_id": HEAD_ID,
            "launch_multiple": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
    }


@contextlib.contextmanager
def autoscaled():
    """A cluster of a head alone; the others come when they are asked for.

    It gives what a driver that has left it joins it by again.
    """
    with tempfile.TemporaryDirectory(prefix="tr-", ignore_cleanup_errors=True) as folder:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        address = f"127.0.0.1:{port}"
        path = Path(folder, "config.json")
        path.write_text(json.dumps(config(address)))
        environment = os.environ | {
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_FAKE_CLUSTER": "1",
            "RAY_enable_autoscaler_v2": "1",
            "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
        }
        command = [
            Path(sys.executable).with_name("ray"), "start", "--head", "--block",
            f"--port={port}", "--node-ip-address=127.0.0.1", "--num-cpus=1", "--num-gpus=0",
            "--include-dashboard=false", f"--object-store-memory={STORE}",
            f"--temp-dir={folder}", f"--autoscaling-config={path}",
        ]  # fmt: skip
        head = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        family = []
        try:
            _wait_for(port, head)
            _connect(address)
            yield partial(_connect, address)
            family = psutil.Process(head.pid).children(recursive=True)
        finally:
            ray.shutdown()
            head.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                head.wait(timeout=20)
            for process in [*family, head]:
                with contextlib.suppress(psutil.Error, OSError):
                    process.kill()


def _connect(address):
    ray.init(address=address, namespace=NAMESPACE, logging_level="ERROR", log_to_driver=False)


def _wait_for(port, head):
    deadline = time.monotonic() + 120
    while True:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        if head.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the head did not come up (status {head.poll()})")
        time.sleep(0.2)


def workers():
    """Nodes beside the head, by the label of their GPUs."""
    labels = [node["Labels"] for node in ray.nodes() if node["Alive"]]
    return Counter(label[ACCELERATOR_LABEL] for label in labels if ACCELERATOR_LABEL in label)


class Watched:
    """Counts the nodes of each kind in a thread beside the campaign."""

    def __init__(self):
        self.most = Counter()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self):
        while not self._over.wait(0.2):
            for kind, count in workers().items():
                self.most[kind] = max(self.most[kind], count)

    def stop(self):
        self._over.set()
        self._thread.join()
