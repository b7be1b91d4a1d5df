"""The pool of profilers alone on an emulated Ray cluster: the program behind `test_profiler_pool`.

    python tests/cluster/actors/pool_scenarios.py SCENARIO

It prints what happened as one line of JSON.
"""

from __future__ import annotations

import time

import ray
from emulated_cluster import A100, FakePool, emulated, main, wait_until
from fakes import mark
from ray.autoscaler.v2.sdk import get_cluster_status

from trappm.cluster.campaign import profiler_pool
from trappm.profiler.errors import DeviceError


def has_joined(pool, count, wanted=100, at_most=100):
    pool.want(dict.fromkeys(pool.devices, wanted), dict.fromkeys(pool.devices, at_most))
    pool.wait(0.1)  # which welcomes those that have started
    return len(pool.refresh_workers()) == count


def dismissed_after_its_node():
    with emulated([("A100", 1)]) as made:
        pool = FakePool([A100], may_grow=False)
        wait_until(lambda: has_joined(pool, 1))
        (worker,) = pool.refresh_workers()
        made.remove_node(made.measuring[0], allow_graceful=False)
        wait_until(lambda: not any(node["Alive"] for node in ray.nodes()[1:]))
        pool.dismiss(worker)
        time.sleep(10.0)  # until demands are reported
        demands = get_cluster_status(made.address).resource_demands
        return {"demands": [str(demand) for demand in demands.ray_task_actor_demand]}


def given_back():
    profiler_pool.RELEASE_S = 2.0
    with emulated([("A100", 2)]):
        pool = FakePool([A100], may_grow=True)
        wait_until(lambda: has_joined(pool, 2))
        end = time.monotonic() + 2 * profiler_pool.RELEASE_S
        while time.monotonic() < end:
            has_joined(pool, 2, wanted=1)
        waiting, free = len(pool.refresh_workers()), ray.available_resources().get("GPU", 0)
        wait_until(lambda: has_joined(pool, 0, wanted=0))
        wait_until(lambda: ray.available_resources().get("GPU", 0) == 2)
        free_at_last = ray.available_resources()["GPU"]
        return {"while_work_waits": waiting, "free_then": free, "free_at_last": free_at_last}


def surplus():
    """One of two idle workers is for another campaign."""
    with emulated([("A100", 2)]):
        pool = FakePool([A100], may_grow=True)
        wait_until(lambda: has_joined(pool, 2))
        wait_until(lambda: has_joined(pool, 1, at_most=1))
        wait_until(lambda: ray.available_resources().get("GPU", 0) == 1)
        return {"free": ray.available_resources()["GPU"]}


def asked_by_need():
    with emulated([("A100", 1)]) as made:
        pool = FakePool([A100], may_grow=True)
        wait_until(lambda: has_joined(pool, 1))
        asked = []
        for wanted in (5, 3, 1):
            end = time.monotonic() + 10.0  # until demands are reported
            while time.monotonic() < end:
                has_joined(pool, 1, wanted)
            demands = get_cluster_status(made.address).resource_demands.ray_task_actor_demand
            asked.append(sum(bundle.count for d in demands for bundle in d.bundles_by_count))
        return {"asked": asked}


def repaired():
    messages = []
    with emulated([("A100", 1)]) as made:
        (node,) = made.measuring
        fault = mark(node.node_id, "fails to start")
        pool = FakePool([A100], may_grow=True, tell=messages.append)
        wait_until(lambda: has_joined(pool, 0) and len(messages) >= 2)
        awaited = list(pool.list_awaited())
        fault.unlink()
        wait_until(lambda: has_joined(pool, 1))
        return {"messages": messages, "awaited": sorted(set(awaited)), "joined": 1}


def broken_here():
    with emulated([("A100", 1)]) as made:
        mark(made.measuring[0].node_id, "fails to start")
        pool = FakePool([A100], may_grow=False)
        try:
            wait_until(lambda: has_joined(pool, 1))
        except DeviceError as error:
            return {"error": str(error)}
    return {"error": None}


if __name__ == "__main__":
    main([
        dismissed_after_its_node, given_back, surplus, asked_by_need, repaired,
        broken_here,
    ])  # fmt: skip
