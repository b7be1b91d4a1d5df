"""A Ray cluster of several nodes on this machine, and campaigns on it that make their labels up.

Ray, the pool of profilers, the campaign and the store are the real ones; profiler and learner are
those of `fakes`. Import it in programs of their own only, since Ray reads its environment when it
is imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

os.environ |= {
    "RAY_AUTH_MODE": "disabled",  # everything listens on loopback, for a minute
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
}
os.environ.pop("TRAPPM_DATABASE", None)
# The nodes run the same TraPPM as this process: of this tree, or of an installed wheel.
ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests" / "cluster"))
TRAPPM = Path(find_spec("trappm").origin).parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], str(TRAPPM)])

import psutil  # noqa: E402
import ray  # noqa: E402
from fakes import FakeLearner, FakeProfiler, FakeTraces, Inline, owned  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from tenacity import Retrying, stop_after_attempt  # noqa: E402

import trappm.cluster.campaign.actor  # noqa: E402
import trappm.cluster.launch  # noqa: E402
from trappm.cluster.campaign.actor import CampaignActor  # noqa: E402
from trappm.cluster.campaign.campaign import CampaignRunner  # noqa: E402
from trappm.cluster.campaign.learner_handle import LearnerHandle  # noqa: E402
from trappm.cluster.campaign.process import Follower  # noqa: E402
from trappm.cluster.campaign.profiler_pool import ProfilerPool  # noqa: E402
from trappm.cluster.ray_runtime import ACCELERATOR_LABEL, NAMESPACE  # noqa: E402
from trappm.cluster.spec import CampaignSpec  # noqa: E402
from trappm.store import Home, Patience, Store  # noqa: E402

A100, V100 = "simulated:a100", "simulated:v100"
NODES = [("A100", 2), ("A100", 1), ("V100", 1)]
"""Of most scenarios: labels, and how many GPUs each has."""


class FakeCampaignActor(CampaignActor):
    """The campaign of the real actor, with workers and a learner that make everything up.

    With `NODES_ARE_MACHINES`, no node finds processes or files of another one.
    """

    def __init__(self, home, *arguments):
        if os.environ.get("NODES_ARE_MACHINES"):
            node_id = ray.get_runtime_context().get_node_id()
            home /= f"home of {node_id}"
        super().__init__(home, *arguments)

    def _make_profilers(self):
        return FakePool(self.spec.devices.keys, may_grow=True, tell=partial(self._note, "node"))

    def _make_learner(self):
        return fake_learner(partial(self._note, "learner"))


def fake_learner(tell, **arguments):
    """The handle of a learner actor that learns nothing."""
    return LearnerHandle(tell=tell, labels=60, **{"learner": FakeLearner} | arguments)


class FakePool(ProfilerPool):
    """The real pool, with profilers that make their measurements up."""

    def __init__(self, devices, **fields):
        super().__init__(devices, profiler=FakeProfiler, **fields)
        self.measured = []
        """Measurements as they come: when, device, and host with process."""

    def collect(self):
        finished = super().collect()
        for entry in finished:
            if entry.measurement is not None:
                host = entry.measurement.environment["host"]
                self.measured.append((time.monotonic(), entry.worker.device, host))
        return finished

    def trace(self, keys):
        return FakeTraces(keys)


def spec(labels, devices=(A100, V100)):
    """A campaign of about this number of labels, two thirds of them on A100s."""
    share = max(4, labels // 12)
    groups = [{
        "architectures": ["resnet18", "resnet34", "vit_tiny_patch16_224", "convnext_atto"],
        "batch_sizes": list(range(1, 2 * labels)), "input_sizes": [64],
    }]  # fmt: skip
    return CampaignSpec.model_validate({
        "name": "emulated", "devices": dict(zip(("source", "target"), devices, strict=True)),
        "evaluation": {"source": share, "target": share // 2, "architecture_share": 0.3},
        "initial": {"source": 2 * share, "target": share},
        "rounds": {"count": 5, "source": share, "target": share // 2},
        "pool": {"groups": groups},
    })  # fmt: skip


@contextlib.contextmanager
def emulated(nodes, head_cores=2):
    """A cluster with a head that measures nothing, and these (label, GPUs) nodes."""
    with tempfile.TemporaryDirectory(prefix="tr-", ignore_cleanup_errors=True) as folder:
        os.environ["RAY_TMPDIR"] = folder  # where it notes its address, which others would join
        Path(folder, "ray").mkdir()
        shared = {"object_store_memory": 80 << 20, "memory": 1 << 30, "include_dashboard": False}
        of_head = {
            **shared, "num_cpus": head_cores, "memory": 4 << 30, "no_monitor": True,
            "temp_dir": folder,
        }  # fmt: skip
        made = patiently(lambda: Cluster(initialize_head=True, head_node_args=of_head))
        made.shared = shared
        try:
            ray.init(address=made.address, namespace=NAMESPACE, logging_level="ERROR",
                     log_to_driver=False)  # fmt: skip
            made.measuring = [add(made, *node) for node in nodes]
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


def patiently(start):
    """Start a node; on a busy machine it may not be up in the half minute that Ray gives it."""
    return Retrying(stop=stop_after_attempt(4), reraise=True)(start)


def add(made, label, gpus):
    """A node that joins the cluster."""
    # Ray sets a handler of signals, which it may only from the main thread; faults have their own.
    in_main_thread = threading.current_thread() is threading.main_thread()
    silent = mock.patch("ray._private.utils.set_sigterm_handler")
    with contextlib.nullcontext() if in_main_thread else silent:
        return patiently(lambda: made.add_node(
            num_cpus=1, num_gpus=gpus, wait=False,
            labels={ACCELERATOR_LABEL: label} if label else {}, **made.shared,
        ))  # fmt: skip


def play(url, plan, faults=lambda measured: None):
    """Run a campaign on the cluster that is up, with its learner in this process.

    Args:
        url: URL of its label store.
        plan: Its campaign file.
        faults: Called in a thread of its own with `FakePool.measured`.
    """
    patience = Patience(tell=lambda message: campaign.note("store", message))
    with Store.open(url, patience) as store:
        campaign_id = created(store, plan)
        workers = FakePool(
            plan.devices.keys, may_grow=True, tell=lambda message: campaign.note("node", message)
        )
        campaign = CampaignRunner(
            store=owned(store, campaign_id), id=campaign_id, spec=plan, profilers=workers,
            snapshots=Path("unused"), learner=Inline(FakeLearner()),
        )  # fmt: skip
        injected = ThreadPoolExecutor(1).submit(faults, workers.measured)
        campaign.run()
        injected.result(timeout=60)
        return summary(store, campaign_id, plan) | {
            "workers": len({host for _, _, host in workers.measured}),
            "hosts": len({host.split()[0] for _, _, host in workers.measured}),
        }


def summary(store, campaign_id, plan):
    """What the store tells of a campaign that has ended."""
    return {
        "budget": {d: plan.budget(d) for d in plan.devices.keys},
        "labels": Counter(label.device for label in store.labels.of_campaign(campaign_id)),
        "states": Counter(str(a.state) for a in store.assignments.of_campaign(campaign_id)),
        "outcomes": store.campaigns.outcome_counts(campaign_id),
        "rounds": [r.is_closed for r in store.rounds.all(campaign_id)],
        "state": str(store.campaigns.get(campaign_id).state),
        "events": [[e.kind, e.message["message"]] for e in store.campaigns.events(campaign_id)],
    }


def wait_for(measured, count, device=None):
    """Wait until this number of attempts (on this device) are measured."""
    wait_until(lambda: sum(device in {None, d} for _, d, _ in list(measured)) >= count)


def first_after(measured, moment, but_not_on):
    """Wait for the first attempt after a moment that is not on these hosts."""
    wait_until(lambda: any(
        at > moment and host.split()[0] not in but_not_on for at, _, host in list(measured)
    ))  # fmt: skip


def campaign_process():
    """The id of the process of the one campaign actor."""
    (pid,) = [p.pid for p in psutil.process_iter(["cmdline"])
              if "ray::FakeCampaignActor" in " ".join(p.info["cmdline"] or [])]  # fmt: skip
    return pid


def created(store, plan):
    """The id of a new campaign."""
    return store.campaigns.create(plan.name, plan.model_dump(mode="json"), plan.seed).id


def launched(url, store, plan):
    """The id of a new campaign that runs by itself."""
    campaign_id = created(store, plan)
    launch(url, campaign_id, plan)
    return campaign_id


def finished(store, campaign_id, plan):
    """What the store tells of a campaign, once it has finished."""
    wait_until(lambda: store.campaigns.state(campaign_id) == "finished")
    return summary(store, campaign_id, plan)


def launch(url, campaign_id, plan):
    """Has a campaign run by itself, launched by a shell that alone knows the URL."""
    trappm.cluster.campaign.actor.CampaignActor = FakeCampaignActor
    os.environ["TRAPPM_DATABASE"] = url
    home = Home(Path(os.environ["TRAPPM_HOME"]))
    with Store.open(url) as store:
        follower = Follower(store, campaign_id)
        actor = trappm.cluster.launch._start_actor(store, home, campaign_id, plan, "auto", print)
        end = trappm.cluster.launch._follow(
            store, follower, actor, lambda progress: None, is_detached=True, until_begun=True
        )
    assert end is trappm.cluster.launch.End.LEFT


def family(node):
    """All processes of an emulated node."""
    ids = [started.process.pid for all_of in node.all_processes.values() for started in all_of]
    parents = [psutil.Process(pid) for pid in ids]
    return [*parents, *(child for p in parents for child in p.children(recursive=True))]


def attempts(store, campaign_id):
    by_device = store.campaigns.outcome_counts(campaign_id).values()
    return sum(sum(counts.values()) for counts in by_device)


def wait_for_attempts(store, campaign_id, count):
    wait_until(lambda: attempts(store, campaign_id) >= count)


def wait_until(condition):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def main(scenarios):
    """Run the scenario that the command line names, with its arguments; print its report."""
    name, *arguments = sys.argv[1:]
    report = {f.__name__: f for f in scenarios}[name](*arguments)
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()
    os._exit(0)  # some actors are frozen


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not find it
