"""A campaign on an emulated cluster, launched by a shell that alone knows the password: a program.

    python tests/cluster/actors/shell_gone.py CREDENTIALS

CREDENTIALS is a file of JSON: `url`, without a password, and `password`. Nodes know neither. The
shell is a process of its own, which is gone when the campaign's process is killed and Ray starts it
again. Printed is one line of JSON: what came of the campaign, which TraPPM each node runs, and
where the password was to be seen.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import ray
from emulated_cluster import (
    NAMESPACE,
    attempts,
    campaign_process,
    created,
    emulated,
    finished,
    launch,
    spec,
    wait_for_attempts,
    wait_until,
)
from sqlalchemy import make_url

import trappm
from trappm.cluster.ray_runtime import node_options
from trappm.store import Store

NODES = [("A100", 1), ("V100", 1)]
PLAN = spec(60)


def main(url, password):
    own = make_url(url).set(password=password).render_as_string(hide_password=False)
    with emulated(NODES) as made, Store.open(own) as store:
        campaign_id = created(store, PLAN)
        shell = [sys.executable, __file__, "shell", made.address, campaign_id, url]
        gone = subprocess.run(
            shell,
            env=os.environ | {"PGPASSWORD": password},
            check=False,
            capture_output=True,
            text=True,
        )
        assert gone.returncode == 0, gone.stderr
        wait_for_attempts(store, campaign_id, 10)
        os.kill(campaign_process(), 9)
        before = attempts(store, campaign_id)
        wait_until(lambda: attempts(store, campaign_id) > before)
        seen = {**in_processes(), **in_files(os.environ["RAY_TMPDIR"])}
        seen |= {
            "actors": str(ray._private.state.actors()),
            "shell": gone.stdout + gone.stderr,
        }
        report = finished(store, campaign_id, PLAN)
        seen |= in_files(os.environ["RAY_TMPDIR"])
        where = ray.remote(lambda: trappm.__file__)
        nodes = [node["NodeID"] for node in ray.nodes()]
        return report | {
            "trappm": ray.get([where.options(**node_options(node)).remote() for node in nodes]),
            "looked_at": len(seen),
            "leaks": [place for place, text in seen.items() if password in text],
        }


def in_processes():
    """What is to be seen of each other process of this machine: its command, its environment."""
    visible = {}
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid():
                visible[str(process)] = " ".join(process.cmdline()) + str(process.environ())
        except psutil.Error:
            continue
    return visible


def in_files(folder):
    """What Ray has written there."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path): path.read_text(errors="replace") for path in files}


def shell(address, campaign_id, url):
    ray.init(address=address, namespace=NAMESPACE, logging_level="ERROR", log_to_driver=False)
    launch(url, campaign_id, PLAN)


if __name__ == "__main__":
    if sys.argv[1] == "shell":
        shell(*sys.argv[2:])
    else:
        sys.stdout.write(json.dumps(main(**json.loads(Path(sys.argv[1]).read_text()))))
