"""A soak: one long campaign under a hundred faults of all kinds finds each label exactly once."""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict, deque
from contextlib import ExitStack
from dataclasses import dataclass, replace
from hashlib import sha256

import pytest
from fakes import (
    Commits,
    FakeLearner,
    FakeProfiler,
    FakeWorkers,
    Killed,
    UnfinishedError,
    campaign,
)
from store_samples import fill_the_disk, lost_reply

from trappm.cluster.campaign.campaign import CampaignStopped
from trappm.cluster.campaign.workers import Finished, Task, Worker
from trappm.cluster.launch import order_stop
from trappm.profiler.errors import CampaignError
from trappm.store import Assignment, CampaignState, Patience, Store
from trappm.store.records import MAX_LOSSES

SOAK = {
    "devices": {"source": "a100", "target": "v100"},
    "evaluation": {"source": 40, "target": 20, "architecture_share": 0.3},
    "initial": {"source": 60, "target": 20},
    "rounds": {"count": 10, "source": 10, "target": 5},
    "canary": {
        "configuration": {"architecture": "resnet10t", "batch_size": 1, "input_size": 64},
        "every_measurements": 6,
        "reference_readings": 1,
    },
    "pool": {
        "groups": [
            {
                "architectures": ["resnet10t", "resnet14t", "resnet18", "vgg11", "convnext_atto"],
                "batch_sizes": list(range(1, 71)),
                "input_sizes": [64],
            }
        ]
    },
}  # fmt: skip
PLANNED = {
    ("a100", "evaluate"): 40,
    ("a100", "train"): 60 + 10 * 10,
    ("v100", "evaluate"): 20,
    ("v100", "train"): 20 + 10 * 5,
}
NODES = {"n1": ("a100", 3), "n2": ("a100", 3), "n3": ("a100", 3), "n4": ("v100", 2),
         "n5": ("v100", 2), "n6": ("v100", 2)}  # fmt: skip
"""Device and number of GPUs of each node."""
WORKERS = [
    Worker(f"{node}-{gpu}", device, node, "stack")
    for node, (device, gpus) in NODES.items()
    for gpu in range(gpus)
]

PROCESS_KILLED = "the campaign's process is killed at a commit"
PAUSED = "the campaign is paused and resumed"
LEARNER_FAILED = "the learner fails"
WORKER_LOST = "a worker is lost with its step"
NODE_LOST = "a node is lost with its workers, and comes back"
HOST_FAILURE = "a step fails on one host"
TIMED_OUT = "a step takes longer than its limit"
CANARY_STOPPED = "a GPU is slow until its canary sets it aside"
DISK_FULL = "the disk of the store is full for a moment"
REPLY_LOST = "the reply to recorded results is lost, so they arrive twice"
KINDS = (
    PROCESS_KILLED, PAUSED, LEARNER_FAILED, WORKER_LOST, NODE_LOST, HOST_FAILURE, TIMED_OUT,
    CANARY_STOPPED, DISK_FULL, REPLY_LOST,
)  # fmt: skip
FAULTS = 110
MIN_FAULTS = 85
MINUTE_S = 60.0
MINUTES = (1, 1, 2, 2, 3, 12)
"""Durations of measurements."""
LOST = "lost"
OUTCOMES = {WORKER_LOST: LOST, NODE_LOST: LOST, HOST_FAILURE: "error", TIMED_OUT: "timeout"}
"""End of a step by the kind of fault that it meets."""
CRASHED = "the learner crashed 3 times"


@dataclass(eq=False)
class Running:
    """A task on a worker."""

    worker: Worker
    task: Task
    ends_at: float
    fault: str | None = None
    """Kind of the fault that it meets."""
    is_lost: bool = False

    @property
    def place(self):
        return self.worker.device, self.task.configuration.id

    @property
    def is_label(self):
        return isinstance(self.task, Assignment)


class Cluster(FakeWorkers):
    """GPUs of several nodes, which outlive the processes of a campaign, and all that fails there.

    A minute passes with each wait. A fault is armed when a label's measurement starts, and counted
    in `injected` once the campaign has met it.
    """

    def __init__(self, seed):
        super().__init__()
        self.chance = random.Random(seed)
        kinds = [*KINDS * 4, *self.chance.choices(KINDS, k=FAULTS - 4 * len(KINDS))]
        self.chance.shuffle(kinds)
        self.to_come = deque(kinds)
        self.injected = Counter()
        self.store = None
        self.now = 0.0
        self.possible = defaultdict(Counter)
        """Outcomes and losses that were handed over, by device and configuration."""
        self.certain = defaultdict(Counter)
        """Those that the campaign has surely recorded against a lease."""
        self.published = []
        self.learner_fails = False
        self._until_next = 3
        self._handed = []
        self._back_at = Counter()
        self._failing_hosts, self._timeouts = {}, Counter()
        self._leaving = self._slow = self._repair = None
        self._has_reference = set()
        self._is_killing = self._is_to_pause = self._is_paused = self._loses_reply = False
        self._kill, self._replies = ExitStack(), ExitStack()

    def refresh_workers(self):
        self._settle()
        self._repair_set_aside()
        closed = [part.is_closed for part in self.store.rounds.all(self.campaign.id)]
        assert closed == sorted(closed, reverse=True), "a round was closed before an earlier one"
        return [worker for worker in WORKERS if self._back_at[worker.name] <= self.now]

    def list_awaited(self):
        return [worker.device for worker in WORKERS if self._back_at[worker.name] > self.now]

    def list_running(self):
        return [(entry.worker, entry.task) for entry in self._running]

    def start(self, worker, task, protocol):
        self._settle()
        self._protocol = protocol
        minutes = self.chance.choice(MINUTES)
        entry = Running(worker, task, self.now + minutes * MINUTE_S)
        assert worker.name not in {one.worker.name for one in self._running}
        if entry.is_label:
            at_work = {one.place for one in self._running if one.is_label}
            assert entry.place not in at_work, "two workers measure the same"
            assert not self.certain[entry.place]["ok"], "it has a label already"
            self._until_next -= 1
            if self._until_next <= 0 and self.to_come:
                self._until_next = self.chance.randint(1, 5)
                self._arm(self.to_come.popleft(), entry)
        self._running.append(entry)

    def wait(self, timeout_s):
        self._settle()
        self.now += MINUTE_S
        if self._is_to_pause:
            order_stop(self.store, self.campaign.id, CampaignState.PAUSED)
            self._is_to_pause, self._is_paused = False, True
        for worker in WORKERS:
            if worker.host == self._leaving:
                self._back_at[worker.name] = self.now + self._absence_s
        for entry in self._running:
            if entry.worker.host == self._leaving:
                entry.is_lost, entry.ends_at = True, self.now
        self._leaving = None
        return self.collect()

    def collect(self):
        back = [entry for entry in self._running if entry.ends_at <= self.now]
        self._running = [entry for entry in self._running if entry.ends_at > self.now]
        has_results = any(entry.is_label and not entry.is_lost for entry in back)
        if self._loses_reply and has_results and not self._is_killing:
            self._loses_reply = False
            self._replies.callback(self.injected.update, [REPLY_LOST])
            self._replies.enter_context(lost_reply(self.store))
        return [self._finished(entry) for entry in back]

    def begin_process(self):
        """Forget what an earlier process of the campaign has begun."""
        self._running, self._handed = [], []
        self._is_to_pause = self._is_paused = False

    def end_process(self, fault):
        """Disarm what was meant for the process that has ended, by a fault of this kind or none."""
        self._kill.close()
        self._is_killing = False
        self._replies.close()
        if fault != PROCESS_KILLED:
            self._settle()
        if fault is not None:
            self.injected[fault] += 1

    def kill_at_commit(self, number):
        self._is_killing = True
        self._kill.enter_context(Commits(self.store, number))

    def repair_disk(self):
        if self._repair is not None:
            self._repair()
            self._repair = None
            self.injected[DISK_FULL] += 1

    def _finished(self, entry):
        worker, task = entry.worker, entry.task
        if entry.is_lost:
            absent_until = self.now + self.chance.randint(1, 5) * MINUTE_S
            self._back_at[worker.name] = max(self._back_at[worker.name], absent_until)
            self._hand_over(entry, LOST)
            return Finished(worker, task, None, "its worker is gone", is_lost=True)
        outcome, cost = "ok", 10.0 * task.configuration.batch_size
        if not entry.is_label:
            cost *= 2 if worker.name == self._slow else 1
        elif self._failing_hosts.get(entry.place) == worker.host:
            outcome = "error"
        elif self._timeouts[entry.place]:
            self._timeouts[entry.place] -= 1
            outcome = "timeout"
        self._hand_over(entry, outcome)
        made = FakeProfiler(worker.device, worker.name).measure(
            task.configuration, self._protocol, task.attempt_key, step_ms=cost, outcome=outcome
        )
        return Finished(worker, task, replace(made, duration_s=2 * MINUTE_S))

    def _hand_over(self, entry, outcome):
        self._handed.append((entry, outcome))
        if entry.is_label:
            self.possible[entry.place][outcome] += 1

    def _settle(self):
        """Note that the campaign has recorded what was handed over: it has come back since."""
        self._replies.close()
        handed, self._handed = self._handed, []
        if self._is_paused:
            return  # its leases were taken back, so that nothing counts against them
        for entry, outcome in handed:
            if entry.is_label:
                self.certain[entry.place][outcome] += 1
            elif outcome == "ok" and entry.worker.name != self._slow:
                self._has_reference.add(entry.worker.name)
            if entry.fault is not None and OUTCOMES[entry.fault] == outcome:
                self.injected[entry.fault] += 1

    def _repair_set_aside(self):
        """Repair the slow GPU once its canary has set it aside."""
        if self._slow is None:
            return
        events = self.store.campaigns.events(
            self.campaign.id, kind="canary", after=self._slow_since
        )
        messages = [e.message["message"] for e in events if e.message["worker"] == self._slow]
        if any("the canary takes" in message for message in messages):
            self._slow = None
            self.injected[CANARY_STOPPED] += 1

    def _arm(self, kind, entry):
        """Prepare a fault; one that is not possible now comes later."""
        place, worker = entry.place, entry.worker
        ends = self._is_killing or self._is_to_pause
        if kind == PROCESS_KILLED and not ends:
            self.kill_at_commit(self.chance.randint(1, 6))
        elif kind == PAUSED and not ends:
            self._is_to_pause = True
        elif kind == LEARNER_FAILED and not self.learner_fails:
            self.learner_fails = True
        elif kind == WORKER_LOST:
            entry.is_lost, entry.fault = True, kind
        elif kind == NODE_LOST and self._leaving is None:
            self._leaving, entry.fault = worker.host, kind
            self._absence_s = self.chance.randint(5, 40) * MINUTE_S
        elif kind == HOST_FAILURE:
            self._failing_hosts[place], entry.fault = worker.host, kind
        elif kind == TIMED_OUT:
            self._timeouts[place], entry.fault = self.chance.choice((1, 1, 1, 99)), kind
        elif kind == CANARY_STOPPED and self._slow is None and worker.name in self._has_reference:
            self._slow = worker.name
            last = self.store.campaigns.events(self.campaign.id, last=1)
            self._slow_since = last[0].id if last else 0
        elif kind == DISK_FULL and self._repair is None:
            self._repair = fill_the_disk(self.store)
        elif kind == REPLY_LOST and not self._loses_reply:
            self._loses_reply = True
        else:
            self.to_come.append(kind)


class SlowLearner(FakeLearner):
    """A learner that takes minutes, and whose snapshot is named after the labels that it knows."""

    def __init__(self, cluster):
        super().__init__()
        self._cluster, self._minutes = cluster, 0

    def fit(self, labels):
        self._take(minutes=6)
        known = sorted((x.device, x.configuration_id, x.role, x.values) for x in labels)
        self.snapshot = sha256(repr(known).encode()).hexdigest()
        return super().fit(labels)

    def choose(self, request):
        self._take(minutes=3)
        return super().choose(request)

    def publish(self, *arguments):
        """Publish; the process of the first publication is killed at its next commit."""
        if not self._cluster.published:
            self._cluster.kill_at_commit(1)
        self._cluster.published.append(self.snapshot)
        return super().publish(*arguments)

    def _take(self, minutes):
        if self._cluster.learner_fails:
            self._cluster.learner_fails = False
            self._cluster.injected[LEARNER_FAILED] += 1
            raise CampaignError(CRASHED)
        self._minutes = (self._minutes + 1) % minutes
        if self._minutes:
            raise UnfinishedError


def soaked(store, cluster):
    """Run a campaign, continued by another process after each that ends; return its last run."""
    campaign_id = None
    while True:
        learner, fault = SlowLearner(cluster), None
        cluster.begin_process()
        run = campaign(store, cluster, learner, campaign_id, lambda: cluster.now, **SOAK)
        campaign_id = run.id
        try:
            run.run()
            return run, learner
        except Killed:
            fault = PROCESS_KILLED
        except CampaignStopped:
            fault = PAUSED
        except CampaignError as error:
            if str(error) != CRASHED:
                raise
        finally:
            cluster.end_process(fault)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_long_campaign_under_many_faults_finds_each_label_exactly_once(new_store, seed):
    cluster = Cluster(seed)
    patience = Patience(tell=lambda line: None, sleep=lambda seconds: cluster.repair_disk())
    with Store.open(new_store(), patience) as store:
        cluster.store = store
        run, learner = soaked(store, cluster)

        assert cluster.injected.total() >= MIN_FAULTS
        assert min(cluster.injected[kind] for kind in KINDS) >= 2
        assert store.check() == []
        assert_finished_once(store, run.id, cluster, learner)
        assert_each_label_once(store, run.id)
        assert_what_has_no_label_was_abandoned_by_the_rule(store, run.id)
        assert_losses_are_no_failures(store, run.id, cluster)


def assert_finished_once(store, campaign_id, cluster, learner):
    record = store.campaigns.get(campaign_id)
    assert record.state == "finished"
    assert {record.snapshot} == set(cluster.published) == {learner.promoted}
    assert len(store.campaigns.events(campaign_id, kind="finished")) == 1
    rounds = store.rounds.all(campaign_id)
    assert [part.number for part in rounds] == list(range(2 + 10))
    assert all(part.is_closed for part in rounds)
    assert learner.fits[-1].total() == len(store.labels.of_campaign(campaign_id))


def assert_each_label_once(store, campaign_id):
    assignments = store.assignments.of_campaign(campaign_id)
    assert Counter((a.device, a.role) for a in assignments) == PLANNED
    assert len({(a.device, a.configuration) for a in assignments}) == len(assignments)
    assert {str(a.state) for a in assignments} == {"done", "failed"}

    labels = Counter((x.device, x.configuration) for x in store.labels.of_campaign(campaign_id))
    done = [(a.device, a.configuration) for a in assignments if a.state == "done"]
    assert labels == Counter(done)
    attempts, _ = store.query_sql("SELECT attempt_key, assignment_id, outcome FROM measurements")
    assert attempts.attempt_key.is_unique
    ok = Counter(attempts.assignment_id[attempts.outcome == "ok"])
    assert ok == Counter(a.id for a in assignments if a.state == "done")
    table, _ = store.query_sql("SELECT COUNT(*) AS labels FROM labels")
    assert list(table.labels) == [len(labels)]


def assert_what_has_no_label_was_abandoned_by_the_rule(store, campaign_id):
    events = store.campaigns.events(campaign_id, kind="abandoned")
    reported = Counter(event.message["id"] for event in events)
    failed = store.assignments.list_failed(campaign_id)
    for assignment, outcome in failed:
        if assignment.losses < MAX_LOSSES:
            assert (outcome, assignment.failures) in {("timeout", 2), ("timeout", 3), ("error", 3)}
    assert failed
    assert reported == Counter(assignment.id for assignment, _ in failed)
    for event in store.campaigns.events(campaign_id, kind="abandoned"):
        assert re.search(r"no label after \d+ attempts \(\w", event.message["message"])


def assert_losses_are_no_failures(store, campaign_id, cluster):
    lost = Counter(e.message["id"] for e in store.campaigns.events(campaign_id, kind="lost"))
    for assignment in store.assignments.of_campaign(campaign_id):
        place = assignment.device, assignment.configuration.id
        certain, possible = cluster.certain[place], cluster.possible[place]
        assert lost[assignment.id] == assignment.losses
        assert certain[LOST] <= assignment.losses <= possible[LOST]
        failures = certain["error"] + certain["timeout"]
        assert failures <= assignment.failures <= possible["error"] + possible["timeout"]
    assert lost.total() > 0
