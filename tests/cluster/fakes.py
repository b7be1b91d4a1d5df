"""The fake world of campaigns: one profiler that makes its measurements up, one learner.

Tests of the loop run in milliseconds with `FakeWorkers` and `Inline`, which use the two in this
process. `actors/emulated_cluster.py` makes Ray actors of them, on a Ray cluster of several nodes.
The store and the loop are always the real ones.
"""

from __future__ import annotations

import math
import os
import threading
import time
import uuid
from collections import Counter
from pathlib import Path
from zlib import crc32

import numpy as np
import yaml
from sqlalchemy import event

from trappm.cluster.campaign.campaign import CampaignRunner
from trappm.cluster.campaign.planner import Choice
from trappm.cluster.campaign.process import Follower, this_process
from trappm.cluster.campaign.training import TrainingReport
from trappm.cluster.campaign.workers import CanaryCheck, Finished, Worker
from trappm.cluster.launch import order_stop
from trappm.cluster.spec import CampaignSpec, parse_spec
from trappm.cluster.trace_tasks import Traced
from trappm.profiler.errors import CampaignError, TrappmError
from trappm.profiler.host.environment import Code, this_code, utc_now
from trappm.profiler.records import (
    WORKER,
    GraphTemplate,
    Measurement,
    Outcome,
    Provenance,
    StepSummary,
)
from trappm.profiler.traced_step import Refusal, Trace, TraceKey
from trappm.store import Assignment
from trappm.store.records import CampaignState

SPEC = {
    "name": "tiny",
    "seed": 7,
    "devices": {"source": "cpu-2t", "target": "cpu-1t"},
    "evaluation": {"source": 3, "target": 2, "architecture_share": 0.3},
    "initial": {"source": 4, "target": 2},
    "rounds": {"count": 2, "source": 2, "target": 1},
    "pool": {
        "groups": [
            {
                "architectures": ["resnet10t", "resnet14t", "resnet18", "vgg11", "convnext_atto"],
                "batch_sizes": [1, 2, 4],
                "input_sizes": [64],
            }
        ]
    },
}
ONE_DEVICE = {
    "devices": {"source": "cpu-2t"},
    "evaluation": {"source": 3, "architecture_share": 0.3},
    "initial": {"source": 4},
    "rounds": {"count": 2, "source": 2},
}
BUDGET = {"cpu-2t": 3 + 4 + 2 * 2, "cpu-1t": 2 + 2 + 2 * 1}


def spec(**changes) -> CampaignSpec:
    return parse_spec(yaml.safe_dump(SPEC | changes), origin="test")


def graph_of(name: str) -> GraphTemplate:
    """A graph of two nodes whose weights tell names apart."""
    sizes = {n: np.ones((2, 6), np.int64) for n in ("input_shapes", "output_shapes")}
    sizes |= {n: np.ones(2, np.int64) for n in ("macs", "memory_bytes")}
    return GraphTemplate(
        operators=("Conv", "Relu"),
        edges=np.array([[0, 1]]),
        constant=sizes,
        slope=sizes,
        parameters=np.array([1, crc32(name.encode())]),
    )


def without_step(key, name=None):
    """A step whose trace has a made-up graph only, of this name or the model's."""
    graph = graph_of(name or key.model)
    trace = Trace(phase=key.phase, graph=graph, allocations=None, kernels=None, refusal="made up")
    return Traced(key, trace)


OTHER_CODE = Code("0123456789abcdef", "0.2.9")


class FakeProfiler:
    """A profiler that makes its measurements up, in this process or as a Ray actor.

    An actor takes `MEASURE_S` seconds for each.

    Args:
        device: Key of the device.
        host: Name of its host; None for an actor, which asks Ray.
    """

    def __init__(self, device, host=None):
        self._device, self._node = device, None
        if host is None:
            import ray

            self._node = ray.get_runtime_context().get_node_id()
            host = f"{self._node} {os.getpid()}"
        self._host = host

    def stay(self):
        threading.Event().wait()

    def describe(self):
        import ray

        from trappm.cluster.campaign.profiler_pool import process_identity

        return {
            "host": self._node, "gpus": [str(gpu) for gpu in ray.get_gpu_ids()],
            "fingerprint": "stack", "process": process_identity(), "code": this_code(),
        }  # fmt: skip

    def measure(
        self, configuration, protocol, attempt_key, *, step_ms=10.0, outcome="ok",
        failed_in="measure",
    ):  # fmt: skip
        """A measurement that nobody took."""
        if self._node:
            time.sleep(float(os.environ.get("MEASURE_S", "0")))
        outcome = Outcome(outcome)
        simulated = self._device.startswith("simulated:")
        ok = outcome is Outcome.OK
        step = StepSummary(median_ms=step_ms, mean_ms=step_ms, iqr_ms=0, p95_ms=step_ms)
        return Measurement(
            configuration=configuration,
            device=self._device,
            outcome=outcome,
            protocol=protocol,
            started_at=utc_now(),
            duration_s=1.0,
            attempt_key=attempt_key,
            provenance=Provenance.SIMULATED if simulated else Provenance.MEASURED,
            step_samples_ms=(step_ms,) * 8 if ok else (),
            step=step if ok else None,
            memory_mib=100.0 if ok else None,
            missing={} if ok else {"step_time_ms": "no result", "memory_mib": "no result"},
            message=None if ok else f"made to end as {outcome}",
            failed_in=None if ok else failed_in,
            environment={"stack_fingerprint": "stack", "host": self._host},
        )


class FakeWorkers:
    """Workers of each device, on one host.

    Args:
        faults: Faults by the number of the start whose measurement fails.
        stop_after: Number of starts after which the campaign is asked to stop.
        at: Number of a start, and a function that is called then.
        poison: Fault of each measurement of the configuration that is started first.
        canary: Results of a worker's canaries: milliseconds, an outcome, or "lost".
        workers: Names and devices.
        devices: Devices with a worker each, which is named after it.
        sick: Workers that cannot measure anything from a start on, by name; each is on a host of
            its own.
        duplicates: Architectures by the names of others with the same layers.
        trace_of: Traces a step; None: a graph is made up.
    """

    traces_elsewhere = False

    def __init__(
        self,
        faults=None,
        stop_after=None,
        at=(0, None),
        poison=None,
        canary=None,
        workers=(),
        duplicates=None,
        sick=None,
        devices=("cpu-2t", "cpu-1t"),
        trace_of=None,
    ):
        self.sick = dict(sick or {})
        self.wasted: Counter[str] = Counter()
        """Assignments that sick workers were given, by worker."""
        self._trace_of = trace_of
        self.at = at
        self.duplicates = duplicates or {}
        self.faults = dict(faults or {})
        self.poison = poison
        self.canary = {name: list(readings) for name, readings in (canary or {}).items()}
        self.done: list[tuple[str, str]] = []
        self.traced: list[TraceKey] = []
        self._hosts = frozenset(self.sick)
        self._names = workers or [(f"w-{device}", device) for device in devices]
        self.starts: list[tuple[str, str]] = []
        self.most_at_once = 0
        self.stop_after = stop_after
        self.campaign = None
        self._running = []

    @property
    def lines(self):
        """What somebody who follows the campaign has been shown."""
        self._lines += self._follower.news()
        return self._lines

    def follow(self, campaign):
        self.campaign = campaign
        self._follower, self._lines = Follower(campaign.store, campaign.id), []

    def trace(self, keys):
        self.traces = FakeTraces(keys, self._traced, self.may_trace)
        return self.traces

    def may_trace(self):
        return True

    def trace_of(self, key):
        if self._trace_of is not None:
            return self._trace_of(key)
        if key.model == "vgg11":
            return Traced(key, Refusal("too small an input"))
        return without_step(key, self.duplicates.get(key.model))

    def _traced(self, key):
        self.traced.append(key)
        return self.trace_of(key)

    def refresh_workers(self):
        return [
            Worker(name, device, name if name in self._hosts else "host", "stack")
            for name, device in self._names
        ]

    def list_awaited(self):
        return []

    def room(self, device):
        return 0

    def want(self, wanted, at_most, set_aside=()):
        self.at_most = at_most

    def collect(self):
        return self.wait(0)

    def list_running(self):
        return list(self._running)

    def start(self, worker, task, protocol):
        self._running.append((worker, task))
        self.most_at_once = max(self.most_at_once, len(self._running))
        self._protocol = protocol
        what = "canary" if isinstance(task, CanaryCheck) else "label"
        self.done.append((worker.name, what))
        if what != "label":
            return
        self.starts.append((worker.device, task.configuration.id))
        if len(self.starts) == self.at[0]:
            self.at[1]()
        if self.stop_after is not None and len(self.starts) >= self.stop_after:
            order_stop(self.campaign.store, self.campaign.id, CampaignState.PAUSED)

    def wait(self, timeout_s):
        finished = []
        for worker, task in self._running:
            cost, fault = 10.0 * task.configuration.batch_size, None
            if isinstance(task, CanaryCheck):
                left = self.canary.get(worker.name)
                reading = left.pop(0) if left else cost
                cost, fault = (cost, reading) if isinstance(reading, str) else (reading, None)
            else:
                fault = self.faults.pop(len(self.starts), None)
                if self.poison and self.starts[-1] == self.starts[0]:
                    fault = self.poison
            lost = fault == "lost"
            measurement = None if lost else self._measure(worker, task, cost, fault)
            finished.append(Finished(worker, task, measurement, "the profiler crashed", lost))
        self._running = []
        return finished

    def _measure(self, worker, task, cost, fault):
        is_sick = len(self.starts) >= self.sick.get(worker.name, math.inf)
        fault, failed_in = ("error", WORKER) if is_sick else (fault, "measure")
        self.wasted[worker.name] += is_sick and isinstance(task, Assignment)
        return FakeProfiler(worker.device, worker.name).measure(
            task.configuration, self._protocol, task.attempt_key,
            step_ms=cost, outcome=fault or "ok", failed_in=failed_in,
        )  # fmt: skip


class FakeTraces:
    """Traces that are made one by one."""

    def __init__(self, keys, trace_of=without_step, may_trace=lambda: True):
        self._left, self._trace_of, self._may_trace = list(keys), trace_of, may_trace
        self.cancelled = 0
        """Number of traces that were cancelled."""

    def take(self, timeout_s):
        return [self._trace_of(self._left.pop(0))] if self._may_trace() else []

    def cancel(self):
        self.cancelled = len(self._left)


class Inline:
    """A learner that works while the campaign waits for it."""

    def __init__(self, learner):
        self.learner = learner

    def begin(self, method, *arguments):
        self._work = lambda: getattr(self.learner, method)(*arguments)

    def progress(self):
        return (0, 0)

    def wait(self, timeout_s):
        try:
            self.result = self._work()
        except UnfinishedError:
            return False
        except (TrappmError, AssertionError):
            raise
        except Exception as error:  # as the actor's handle does
            raise CampaignError(f"the learner failed: {error}") from error
        return True


class UnfinishedError(Exception):
    """What a learner raises to be asked again later."""


class FakeLearner:
    """A learner that picks the first candidates, and remembers what it was given.

    Args:
        snapshot: Id of the snapshot that it publishes.
    """

    def __init__(self, snapshot="snap1"):
        self.snapshot = snapshot
        self.requests = []
        self.fits: list[Counter] = []
        self.promoted = None

    def progress(self):
        return 0, 0

    def set_pool(self, pool, traces):
        self.pool = {c.id: c for c, _ in pool}

    def fit(self, labels):
        self.fits.append(Counter((x.device, x.role) for x in labels))
        self.train = {
            self.pool[x.configuration_id].architecture for x in labels if x.role == "train"
        }
        self.evaluate = {
            self.pool[x.configuration_id].architecture for x in labels if x.role == "evaluate"
        }
        devices = {x.device: {} for x in labels if x.role == "train"}
        return TrainingReport(devices=devices)

    def choose(self, request):
        self.requests.append(request)
        assert not set(request.candidates) & set(request.known)
        chosen = sorted(request.candidates)[: request.count]
        return [Choice(c, {"rank": i}) for i, c in enumerate(chosen)]

    def publish(self, folder, fields, pairs=(), registry=None):
        return self.snapshot, ()

    def promote(self, registry, snapshot_id):
        self.promoted = snapshot_id


class Killed(BaseException):
    """The process of the campaign ends, with all that it knows."""


class Commits:
    """Ends the process at the commit of this number, before anything is written."""

    def __init__(self, store, last=None):
        self.count, self.last, self.engine = 0, last, store.database.engine

    def __enter__(self):
        event.listen(self.engine, "commit", self._count)
        return self

    def __exit__(self, *_):
        event.remove(self.engine, "commit", self._count)

    def _count(self, connection):
        self.count += 1
        if self.count == self.last:
            raise Killed


def owned(store, campaign_id, cluster=None):
    """The store as a new owner of the campaign; whoever had it is gone."""
    before, owner_id = store.campaigns.get(campaign_id).owner, uuid.uuid4().hex
    if before is not None:
        store.owners.release(campaign_id, before.id)
    store.owners.begin_campaign(campaign_id)
    assert store.owners.claim_campaign(campaign_id, owner_id, this_process(cluster))
    return store.as_owner(campaign_id, owner_id)


def campaign(
    store, workers, learner=None, campaign_id=None, clock=time.monotonic, cluster=None, **changes
):
    if campaign_id is None:
        record = store.campaigns.create("tiny", spec(**changes).model_dump(mode="json"), 7)
        campaign_id = record.id
    made = CampaignRunner(
        store=owned(store, campaign_id, cluster),
        id=campaign_id,
        spec=CampaignSpec.of(store.campaigns.get(campaign_id)),
        profilers=workers,
        learner=Inline(learner or FakeLearner()),
        snapshots=Path("unused"),
        clock=clock,
    )
    workers.follow(made)
    return made


def ran(store, *arguments, **changes):
    """A campaign that has run to its end."""
    run = campaign(store, *arguments, **changes)
    run.run()
    return run


def labels_by_device(store, campaign_id):
    return Counter(label.device for label in store.labels.of_campaign(campaign_id))
