"""What orchestration costs: labels a second through Ray and the store, where measuring is free.

    python benchmarks/orchestration.py [--labels N] [--database URL] [--scenario NAME ...]

Without scenarios: a campaign on an emulated cluster (a head, two A100 nodes with three GPUs in all,
one V100 node) whose profilers answer at once. Ray, the crew, the machine and the label store (a new
SQLite file, or the database at the URL) are the real ones. With scenarios, of
`tests/cluster/emulated_cluster.py`: how long after a fault the next label came.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "tests" / "cluster" / "emulated_cluster.py"
FAULTS = ("node_comes_late", "worker_killed", "worker_frozen", "node_lost")


def played(scenario: str, url: str | None, labels: int, measure_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        url = url or f"sqlite:///{folder}/labels.db"
        environment = os.environ | {"MEASURE_S": str(measure_s), "LABELS": str(labels)}
        command = [sys.executable, str(PROGRAM), scenario, url]
        result = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
    told: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--labels", type=int, default=2_000)
    parser.add_argument("--database")
    parser.add_argument("--scenario", nargs="*", choices=FAULTS, default=())
    asked = parser.parse_args()
    if not asked.scenario:
        told = played("busy", asked.database, asked.labels, 0.0)
        count = sum(told["labels"].values())
        print(f"labels                {count:>10,}")
        print(f"labels a second       {count / told['measuring_s']:>10,.0f}")
        print(f"milliseconds a label  {1000 * told['measuring_s'] / count:>10.2f}")
    for scenario in asked.scenario:
        told = played(scenario, asked.database, 100, 0.1)
        whole = "every label is there" if told["labels"] == told["budget"] else "LABELS ARE LACKING"
        print(f"{scenario:<20}{told['recovery_s']:>8.1f} s to the next label; {whole}")


if __name__ == "__main__":
    main()
