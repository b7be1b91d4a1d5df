"""Campaigns on an emulated Ray cluster, and what happens to them: the program behind
`test_ray_cluster`.

    python tests/cluster/actors/cluster_scenarios.py SCENARIO DATABASE_URL

It prints what came of the campaign as one line of JSON.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
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
from fakes import OTHER_CODE, FakeLearner, is_marked, mark
from ownership_scenarios import (
    database_away,
    postgresql,
    restarted_during_an_outage,
    two_hosts,
)

import trappm.cluster.campaign.profiler_pool
from trappm.cluster import ray_runtime, trace_tasks
from trappm.cluster.campaign import learner_handle as learner_actor
from trappm.cluster.campaign.process import has_live_owner
from trappm.cluster.launch import order_stop
from trappm.profiler.errors import CampaignError
from trappm.profiler.host.environment import this_code
from trappm.profiler.records import QUICK
from trappm.profiler.traced_step import Refusal, TraceKey, entry_to_bytes
from trappm.reports.campaign_facts import live_state
from trappm.store import CampaignState, Store


def calm(url):
    with emulated(NODES):
        return play(url, spec(60))


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


def nodes_that_trace_replaced(url):
    """The only node that traces goes, and another one comes."""
    folder = Path(os.environ["TRAPPM_HOME"])

    def slow(key):
        (folder / f"{key.input_size} begun").touch()
        while not (folder / "go").exists():
            time.sleep(0.1)
        return entry_to_bytes(Refusal(ray.get_runtime_context().get_node_id())), True

    with (
        emulated([("A100", 1)], head_cores=0) as made,
        mock.patch.dict(vars(trace_tasks), _trace_to_bytes=slow),
    ):
        first = add(made, None, 0)
        tasks = trace_tasks.TraceTasks(
            [TraceKey("test_resnet", size) for size in range(2)], off_devices=["a100"]
        )
        wait_until(lambda: list(folder.glob("* begun")))
        made.remove_node(first, allow_graceful=False)
        second = add(made, None, 0)
        (folder / "go").touch()
        traced = list(tasks)
        return {
            "refusals": [t.refusal for t in traced],
            "second": second.node_id,
            "count": len(traced),
        }


def node_comes_late(url):
    with emulated([("A100", 1), ("V100", 1)]) as made:

        def faults(measured):
            wait_for(measured, 12, A100)
            there = {host.split()[0] for _, _, host in list(measured)}
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


def autoscaled_with_a_broken_node(url):
    """The first A100 node that comes cannot measure."""
    os.environ["BREAKS_FIRST"] = "a100"
    with autoscaled():
        watched = Watched()
        report = play(url, spec(240, devices=("a100", "v100")))
        watched.stop()
        broken = Path(os.environ["TRAPPM_HOME"], "first").read_text()
        left = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] == broken]
        return report | {"broken_is_there": bool(left)}


def node_out_of_order(url):
    """One of the nodes cannot measure."""
    with emulated(NODES) as made:
        mark(made.measuring[1].node_id, "is out of order")
        return play(url, spec(60))


def node_of_another_version(url):
    with emulated([*NODES, ("A100", 1)]) as made:
        mark(made.measuring[1].node_id, "has another version")
        mark(made.measuring[3].node_id, "has an earlier version")
        return play(url, spec(60))


def traced_by_the_same_version(url):
    """Of two nodes that trace, one has another version, and later both have."""

    def where(key):
        return entry_to_bytes(Refusal(ray.get_runtime_context().get_node_id())), True

    def with_same_code(code, task, key):
        if is_marked(ray.get_runtime_context().get_node_id(), "has another version"):
            trace_tasks.this_code = lambda: OTHER_CODE
        return trace_tasks._with_same_code(code, task, key)

    keys, error = [TraceKey("test_resnet", size) for size in range(12)], None
    with (
        emulated([], head_cores=0) as made,
        mock.patch.dict(vars(trace_tasks), _trace_to_bytes=where, _with_same_code=with_same_code),
    ):
        good, other = add(made, None, 0), add(made, None, 0)
        mark(other.node_id, "has another version")
        traced = list(trace_tasks.TraceTasks(keys))
        mark(good.node_id, "has another version")
        try:
            list(trace_tasks.TraceTasks(keys))
        except CampaignError as refused:
            error = str(refused)
        hosts = {one.refusal == good.node_id for one in traced}
        return {"count": len(traced), "on_good": hosts == {True}, "error": error}


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


def learner_of_another_version(url):
    """The only node with a GPU for the learner has other code than the campaign."""
    campaign = os.getpid()

    def code():
        return OTHER_CODE if os.getpid() == campaign else this_code()

    with emulated([("V100", 1)]), mock.patch.dict(vars(learner_actor), this_code=code):
        learner = fake_learner(print, device="gpu")
        learner.begin("choose", None)
        try:
            wait_until(lambda: learner.wait(0.5))
        except CampaignError as error:
            return {"error": str(error)}
    return {"error": None}


def node_lost(url):
    with emulated([*NODES, ("V100", 1)]) as made:

        def faults(measured):
            wait_for(measured, 10)
            made.remove_node(made.measuring[2], allow_graceful=False)
            made.remove_node(made.measuring[1], allow_graceful=False)

        return play(url, spec(150), faults)


def worker_frozen(url):
    trappm.cluster.campaign.profiler_pool.HUNG_S = 30.0 - QUICK.timeout_s
    with emulated(NODES):

        def faults(measured):
            wait_for(measured, 10, V100)
            (node,) = {host for _, d, host in measured if d == V100}
            os.kill(int(node.split()[1]), signal.SIGSTOP)

        return play(url, spec(100), faults)


def learner_killed(url):
    with emulated(NODES), tempfile.TemporaryDirectory() as folder:
        flag = Path(folder, "died")
        learner = fake_learner(print, killed_at=str(flag))
        report = play(url, spec(60), learner=learner)
        return report | {"died": flag.exists()}


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


def campaign_node_lost(url):
    """The campaign's own node is lost, and the head lives; then a user resumes on the head."""
    plan = spec(100)
    with emulated(NODES) as made, Store.open(url) as store:
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
        report = {"error": None}
        if url.startswith("sqlite"):  # its file was on that node
            wait_until(lambda: not has_live_owner(store.campaigns.get(campaign_id)))
            report["error"] = live_state(store.campaigns.get(campaign_id))
            launch(url, campaign_id, plan)
        return finished(store, campaign_id, plan) | report


def campaign_node_lost_with_postgresql(_url):
    os.environ["NODES_ARE_MACHINES"] = "yes"
    with postgresql() as (_, url):
        return campaign_node_lost(url)


def gpus_while_tracing(url):
    """How many GPUs are free while the steps of the pool are traced."""
    free = []

    class Pool(FakePool):
        def trace(self, keys):
            if keys:
                time.sleep(3.0)
                free.append(ray.available_resources().get("GPU", 0))
            return super().trace(keys)

    with emulated(NODES), mock.patch.dict(vars(emulated_cluster), FakePool=Pool):
        return play(url, spec(60)) | {"free": free}


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
        calm, steps_traced, nodes_that_trace_replaced, node_comes_late, autoscaled_from_nothing,
        autoscaled_with_a_broken_node, node_out_of_order, node_of_another_version,
        traced_by_the_same_version, learner_on_a_gpu, learner_of_another_version, node_lost,
        worker_frozen, learner_killed, campaign_killed, campaign_node_lost,
        campaign_node_lost_with_postgresql, gpus_while_tracing, paused_and_resumed_at_once,
        two_campaigns, database_away, restarted_during_an_outage, two_hosts,
    ])  # fmt: skip
