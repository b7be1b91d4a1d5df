"""A campaign of 1,000 GPUs and 1,000,000 labels with failures, played in virtual time.

    python benchmarks/cluster/campaign_simulation.py [--labels N] [--workers N] [--seed N]

It is the state machine of `cluster.scheduler.state_machine`, played by the executor of its tests.
Nothing is measured and nothing is stored: what it shows is what the machine itself costs, and how
long GPUs wait because of us. Half of the workers are of either device, eight to a host.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "cluster" / "scheduler")]

import numpy as np  # noqa: E402
from virtual_cluster import VirtualCluster, Weather  # noqa: E402

from trappm.cluster.scheduler.messages import Course  # noqa: E402

ROUNDS = 98
DEVICES = ("a100", "v100")
WEATHER = Weather(
    measuring_s=30.0, learning_s=60.0, choosing_s=5.0, joining_s=60.0,
    failing=0.02, killing=0.005, freezing=0.001, poisoned=0.001,
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--labels", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    share = arguments.labels // (len(DEVICES) * (ROUNDS + 2))
    course = Course(
        devices=DEVICES, shares={device: [share] * (ROUNDS + 2) for device in DEVICES},
        max_attempts=3, keeps_host_quiet=False,
    )  # fmt: skip
    hosts = arguments.workers // (len(DEVICES) * 8)
    workers = dict.fromkeys(DEVICES, (hosts, 8))
    generator = np.random.default_rng(arguments.seed)
    cluster = VirtualCluster(course, workers, WEATHER, generator)
    begin = time.perf_counter()
    cluster.run()
    seconds = time.perf_counter() - begin
    states = Counter(cluster.ledger.state.values())
    print(f"{WEATHER}")
    print(f"workers          {hosts * 8 * len(DEVICES):>12,}")
    print(f"assignments      {states.total():>12,}  {dict(states)}")
    print(f"attempts         {cluster.ledger.starts.total():>12,}")
    print(f"workers lost     {cluster.losses:>12,}")
    print(f"events           {cluster.events:>12,}")
    print(f"virtual time     {cluster.time_s / 3600:>12,.1f} h")
    print(f"real time        {seconds:>12,.1f} s")
    print(
        f"peak memory      {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:>12,.0f} MiB"
    )
    for device in DEVICES:
        idle_s, busy_s = cluster.idle_s[device], cluster.busy_s[device]
        print(f"idle, {device:<11}{idle_s / (idle_s + busy_s):>12.2%}")


if __name__ == "__main__":
    main()
