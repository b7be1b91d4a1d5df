"""A campaign of the papers' size on made-up GPUs, whose clock runs faster: how busy they are.

    python tests/cluster/scaled_campaign.py [--scale 10] [--training-s 60] [--size 1]

The store and the campaign are the real ones; measurements and trainings only take their time. It
prints one line of JSON: the share of the time until the last round during which the GPUs were at
work, CPU time per event, and the peak of memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[n]) for n in (2, 1, 0)]

from fakes import FakeLearner, FakeProfiler, FakeWorkers, Inline, owned  # noqa: E402

from trappm.cluster.campaign.campaign import CampaignRunner  # noqa: E402
from trappm.cluster.campaign.workers import Finished, Worker  # noqa: E402
from trappm.cluster.spec import CampaignSpec  # noqa: E402
from trappm.store import Store  # noqa: E402

DURATION_S = {"a100": 6.0, "v100": 10.0}
GPUS = {"a100": 16, "v100": 8}


class TimedWorkers(FakeWorkers):
    """Workers whose measurements take a while, and that note when each was at work."""

    traces_elsewhere = True

    def __init__(self, scale):
        super().__init__()
        self.scale = scale
        self._draw = np.random.default_rng(1)
        self._running = {}
        self.work = []
        self._workers = [
            Worker(f"{device}-{i}", device, f"{device} node {i // 8}", "stack")
            for device, count in GPUS.items()
            for i in range(count)
        ]

    def refresh_workers(self):
        return self._workers

    def room(self, device):
        return GPUS[device]

    def list_running(self):
        return [(worker, task) for worker, task, _, _ in self._running.values()]

    def start(self, worker, task, protocol):
        seconds = DURATION_S[worker.device] * self._draw.lognormal(0.0, 0.5) / self.scale
        now = time.monotonic()
        self._running[worker.name] = (worker, task, now, now + seconds)
        self._protocol = protocol

    def wait(self, timeout_s):
        now = time.monotonic()
        ends = [end for *_, end in self._running.values()]
        time.sleep(max(min([now + timeout_s, *ends]) - now, 0.0))
        return self.collect()

    def collect(self):
        now = time.monotonic()
        finished = []
        for name, (worker, task, began, end) in list(self._running.items()):
            if end <= now:
                del self._running[name]
                self.work.append((worker.device, task.round_number, began, end))
                measured = FakeProfiler(worker.device, worker.host).measure(
                    task.configuration, self._protocol, task.attempt_key
                )
                finished.append(Finished(worker, task, measured))
        return finished


def spec(size):
    a100, v100 = 160 * size, 60 * size
    groups = [{
        "architectures": [f"resnet{n}" for n in (18, 34, 50, 101, 152)] + ["vgg16", "vgg19"],
        "batch_sizes": list(range(1, 500 * size)), "input_sizes": [224],
    }]  # fmt: skip
    return CampaignSpec.model_validate({
        "name": "scaled", "devices": {"source": "a100", "target": "v100"}, "canary": None,
        "evaluation": {"source": 256 * size, "target": 93 * size, "architecture_share": 0.3},
        "initial": {"source": 320 * size, "target": 90 * size},
        "rounds": {"count": 6, "source": a100, "target": v100},
        "pool": {"groups": groups},
    })  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", type=float, default=10.0)
    parser.add_argument("--training-s", type=float, default=60.0)
    parser.add_argument("--size", type=int, default=1)
    given = parser.parse_args()
    plan, workers = spec(given.size), TimedWorkers(given.scale)
    training_s = given.training_s / given.scale
    with tempfile.TemporaryDirectory() as folder, Store.open(f"sqlite:///{folder}/l.db") as store:
        record = store.campaigns.create(plan.name, plan.model_dump(mode="json"), plan.seed)
        campaign = CampaignRunner(
            store=owned(store, record.id), id=record.id, spec=plan, profilers=workers,
            learner=Inline(FakeLearner(), dict.fromkeys(["set_pool", "fit"], training_s)),
            snapshots=Path("unused"),
        )  # fmt: skip
        began, cpu_s = time.monotonic(), time.process_time()
        campaign.run()
        wall_s, cpu_s = time.monotonic() - began, time.process_time() - cpu_s
        events = len(workers.work)
        report = {"labels": len(store.labels.of_campaign(record.id)), "wall_s": wall_s}
    first = min(start for *_, start, _ in workers.work)
    last_round = max(number for _, number, _, _ in workers.work)
    busy = {}
    for device, count in GPUS.items():
        mine = [w for w in workers.work if w[0] == device]
        until = min(start for _, number, start, _ in mine if number == last_round)
        at_work = sum(min(end, until) - start for *_, start, end in mine if start < until)
        busy[device] = at_work / (count * (until - first))
    real_s = wall_s * given.scale
    report |= {
        "busy_share": busy,
        "events_per_s_of_real_time": events / real_s,
        "cpu_ms_per_event": 1000 * cpu_s / events,
        "core_share_at_4_events_per_s": 4 * cpu_s / events,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
