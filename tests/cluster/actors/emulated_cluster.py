"""A Ray cluster of several nodes on this machine, and campaigns on it that make their labels up.

Ray, the pool of profilers, the machine and the store are the real ones; profilers answer at once,
and learners learn nothing. Import it in programs of their own only, since Ray reads its environment
when it is imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
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
from campaign_crew import FakeLearner, Inline, made_up, owned, without_step  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

import trappm.cluster.actors.profiler_pool  # noqa: E402
import trappm.cluster.campaign.actor  # noqa: E402
import trappm.cluster.campaign.campaign  # noqa: E402
import trappm.cluster.campaign.ownership  # noqa: E402
import trappm.cluster.launch  # noqa: E402
import trappm.store.owners  # noqa: E402
from trappm.cluster.actors.learner import LearnerHandle  # noqa: E402
from trappm.cluster.actors.profiler_pool import ProfilerPool, this_process  # noqa: E402
from trappm.cluster.campaign.actor import CampaignActor  # noqa: E402
from trappm.cluster.campaign.campaign import Campaign  # noqa: E402
from trappm.cluster.campaign.progress import Follower  # noqa: E402
from trappm.cluster.profiles import Traced  # noqa: E402
from trappm.cluster.ray_runtime import ACCELERATOR_LABEL, NAMESPACE  # noqa: E402
from trappm.cluster.spec import CampaignSpec  # noqa: E402
from trappm.profiler.host.environment import Code, this_code  # noqa: E402
from trappm.store import Home, Patience, Store  # noqa: E402

A100, V100 = "simulated:a100", "simulated:v100"
NODES = [("A100", 2), ("A100", 1), ("V100", 1)]
"""Of most scenarios: labels, and how many GPUs each has."""


HOLD = "hold"


@contextlib.contextmanager
def held():
    """No measurement comes to an end meanwhile."""
    hold = Path(os.environ["TRAPPM_HOME"], HOLD)
    hold.touch()
    try:
        yield
    finally:
        hold.unlink()


def marked(what):
    """Return whether this is said of the node that this runs on."""
    host = ray.get_runtime_context().get_node_id()
    return Path(os.environ["TRAPPM_HOME"], f"{host} {what}").exists()


def is_to_break(host, device):
    """Return whether this is the first node of the device that is to break."""
    if os.environ.get("BREAKS_FIRST") != device:
        return False
    first = Path(os.environ["TRAPPM_HOME"], "first")
    with contextlib.suppress(FileExistsError), first.open("x") as note:
        note.write(host)
    return first.read_text() == host


def mark(node, what):
    """Says something of a node."""
    Path(os.environ["TRAPPM_HOME"], f"{node.node_id} {what}").touch()


def other_code():
    """Return code that is not this one's."""
    return Code("0123456789abcdef", "0.2.9")


class MadeUpProfiler:
    """Measures nothing, and answers after `MEASURE_S` seconds."""

    def __init__(self, device):
        if marked("fails to start"):
            raise ModuleNotFoundError("No module named 'timm'")
        self._device = device

    def stay(self):
        threading.Event().wait()

    def describe(self):
        host = ray.get_runtime_context().get_node_id()
        if Path(os.environ["TRAPPM_HOME"], host).exists() or is_to_break(host, self._device):
            return {
                "host": host, "code": this_code(),
                "refusal": f"host {host}: its driver is out of order",
            }  # fmt: skip
        gpus = [str(gpu) for gpu in ray.get_gpu_ids()]
        facts = {
            "host": host, "gpus": gpus, "fingerprint": "stack", "process": this_process(),
        }  # fmt: skip
        if marked("has an earlier version"):  # which does not report its code
            return facts
        return facts | {"code": other_code() if marked("has another version") else this_code()}

    def measure(self, configuration, protocol, attempt_key):
        time.sleep(float(os.environ.get("MEASURE_S", "0")))
        while Path(os.environ["TRAPPM_HOME"], HOLD).exists():
            time.sleep(0.1)
        host = ray.get_runtime_context().get_node_id()
        return made_up(
            configuration, self._device, protocol, attempt_key, host=f"{host} {os.getpid()}"
        )


class MadeUpLearner(FakeLearner):
    """Learns nothing; is killed in its first choice if there is a path to note that at."""

    def __init__(self, dies_once):
        super().__init__()
        self._dies_once = dies_once and Path(dies_once)

    def progress(self):
        return 0, 0

    def choose(self, request):
        if self._dies_once and not self._dies_once.exists():
            self._dies_once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().choose(request)


class MadeUpCampaignActor(CampaignActor):
    """The campaign of the real actor, with workers and a learner that make everything up.

    With `NODES_ARE_MACHINES`, no node finds processes or files of another one.
    """

    def __init__(self, home, *arguments):
        if os.environ.get("NODES_ARE_MACHINES"):
            node_id = ray.get_runtime_context().get_node_id()
            home /= f"home of {node_id}"
        super().__init__(home, *arguments)

    def _workers(self):
        silent_s = float(os.environ.get("SILENT_S", "180"))
        trappm.cluster.actors.profiler_pool.SILENT_S = silent_s
        devices = self.spec.devices.keys
        return MadeUpPool(
            devices,
            may_grow=True,
            tell=partial(self._note, "node"),
            profiler=MadeUpProfiler,
        )

    def _learner(self):
        return LearnerHandle(
            tell=partial(self._note, "learner"),
            labels=self.spec.total,
            learner=MadeUpLearner,
            dies_once=None,
        )


class MadeUpPool(ProfilerPool):
    """The real pool, with such profilers."""

    def trace(self, keys):
        return MadeUpTraces(keys)


class MadeUpTraces:
    """Traces of no model, all at once."""

    def __init__(self, keys):
        self._made = [Traced(key, without_step(key)) for key in keys]

    def take(self, timeout_s):
        made, self._made = self._made, []
        return made

    def cancel(self):
        pass


def spec(
    labels,
    *,
    architectures=("resnet18", "resnet34", "vit_tiny_patch16_224", "convnext_atto"),
    devices=(A100, V100),
):
    """A campaign of about this number of labels, two thirds of them on A100s."""
    share = max(4, labels // 12)
    groups = [{"architectures": list(architectures), "batch_sizes": list(range(1, 2 * labels)),
               "input_sizes": [64]}]  # fmt: skip
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
        made = head({
            **shared, "num_cpus": head_cores, "memory": 4 << 30, "no_monitor": True,
            "temp_dir": folder,
        })  # fmt: skip
        made.shared = shared
        try:
            ray.init(address=made.address, namespace=NAMESPACE, logging_level="ERROR",
                     log_to_driver=False)  # fmt: skip
            made.measuring = [add(made, *node) for node in nodes]
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


def head(arguments, tries=4):
    """A cluster of a head alone; tried again where the machine is very busy, as `add` does."""
    try:
        return Cluster(initialize_head=True, head_node_args=arguments)
    except Exception:  # Ray has no class of its own for it
        if tries == 1:
            raise
        return head(arguments, tries - 1)


def in_main_thread():
    return threading.current_thread() is threading.main_thread()


def add(made, label, gpus, tries=4):
    """A node; on a machine that is very busy it may not be up in the half minute that Ray gives."""
    # Ray sets a handler of signals, which it may only from the main thread; faults have their own.
    silent = mock.patch("ray._private.utils.set_sigterm_handler")
    try:
        with contextlib.nullcontext() if in_main_thread() else silent:
            return made.add_node(
                num_cpus=1, num_gpus=gpus, wait=False,
                labels={ACCELERATOR_LABEL: label} if label else {}, **made.shared,
            )  # fmt: skip
    except Exception:  # Ray has no class of its own for it
        if tries == 1:
            raise
        return add(made, label, gpus, tries - 1)


def play(url, plan, faults=lambda recorded: None, learner=None):
    """Runs a campaign on the cluster that is up; faults happen in a thread beside it.

    Args:
        faults: called with the attempts that are recorded, as they come: when, device, and host
            with process.
        learner: makes one that tells what happens to it by this callable.
    """
    patience = Patience(tell=lambda message: campaign.note("store", message))
    with Store.open(url, patience) as store:
        record = store.campaigns.create(plan.name, plan.model_dump(mode="json"), plan.seed)
        workers = MadeUpPool(
            plan.devices.keys, may_grow=True, profiler=MadeUpProfiler,
            tell=lambda message: campaign.note("node", message),
        )  # fmt: skip
        recorded = []
        keep = Campaign._recorded

        def note(self, finished):
            kept = keep(self, finished)
            for result in finished:
                if result.measurement is not None and "host" in result.measurement.environment:
                    host = result.measurement.environment["host"]
                    recorded.append((time.monotonic(), result.worker.device, host))
            return kept

        Campaign._recorded = note
        campaign = Campaign(
            store=owned(store, record.id), id=record.id, spec=plan, workers=workers,
            snapshots=Path("unused"), learner=learner or Inline(FakeLearner()),
        )  # fmt: skip
        if isinstance(learner, LearnerHandle):
            learner.tell = lambda message: campaign.note("learner", message)
        beside = ThreadPoolExecutor(1).submit(faults, recorded)
        campaign.run()
        beside.result(timeout=60)
        Campaign._recorded = keep
        return summary(store, record.id, plan) | {
            "workers": len({host for _, _, host in recorded}),
            "hosts": len({host.split()[0] for _, _, host in recorded}),
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


def wait_for(recorded, count, device=None):
    """Waits until this number of attempts (on this device) are recorded."""
    deadline = time.monotonic() + 240
    while sum(device in {None, d} for _, d, _ in list(recorded)) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{count} attempts are not there: {len(recorded)}")
        time.sleep(0.02)


def first_after(recorded, moment, device=None, besides=()):
    """Wait for the first attempt after a moment that is not on these hosts."""
    for _ in range(6000):
        for at, d, host in list(recorded):
            if at > moment and device in {None, d} and host.split()[0] not in besides:
                return
        time.sleep(0.02)
    raise TimeoutError("nothing was recorded any more")


def processes(name):
    """Ids of the processes of Ray actors of this class."""
    return [p.pid for p in psutil.process_iter(["cmdline"])
            if name in " ".join(p.info["cmdline"] or [])]  # fmt: skip


def launch(url, campaign_id, plan):
    """Has a campaign run by itself, launched by a shell that alone knows the URL."""
    trappm.cluster.campaign.actor.CampaignActor = MadeUpCampaignActor
    os.environ["TRAPPM_DATABASE"] = url
    home = Home(Path(os.environ["TRAPPM_HOME"]))
    with Store.open(url) as store:
        follower = Follower(store, campaign_id)
        actor = trappm.cluster.launch._start(store, home, campaign_id, plan, "auto", print)
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


def wait_until(condition):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not find it
