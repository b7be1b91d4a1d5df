"""Runs a campaign next to a program that uses a part of one core, and counts its labels.

    python benchmarks/cluster/busy_machine.py            # 50 % of one core
    python benchmarks/cluster/busy_machine.py --duty 0   # a quiet machine, to compare with

Each run has a data folder of its own, so no label of an earlier run is adopted.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time


def keep_busy(duty: float, period_s: float) -> None:
    """Use this share of a core, for good."""
    while True:
        end = time.perf_counter() + duty * period_s
        while time.perf_counter() < end:
            pass
        time.sleep((1 - duty) * period_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--duty", type=float, default=0.5, help="Share of one core (default: 0.5).")
    parser.add_argument("--period", type=float, default=0.1, help="Seconds (default: 0.1).")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        trappm = [sys.executable, "-c", "from trappm.cli import main; main()", "campaign"]
        environment = os.environ | {"TRAPPM_HOME": home}
        if arguments.duty:
            work = (arguments.duty, arguments.period)
            multiprocessing.Process(target=keep_busy, args=work, daemon=True).start()
        begin = time.monotonic()
        launch = [*trappm, "launch", "--preset", "laptop"]
        status = subprocess.run(launch, env=environment, check=False).returncode
        print(
            f"exit status {status} after {(time.monotonic() - begin) / 60:.1f} minutes", flush=True
        )
        subprocess.run([*trappm, "status"], env=environment, check=False)
    return status


if __name__ == "__main__":
    sys.exit(main())
