"""Seconds to build the paper's pool of 25,000 configurations once the static profiles exist.

    python benchmarks/profiler/pool.py [--spec examples/pool_paper.yaml]

Every pair of an architecture and an input size gets the static profile of one small model, so that
what is timed is the pool: reading the file, making the configurations, storing and reading them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from trappm.cluster.pool_file import build, load_pool_file
from trappm.cluster.profiles.static_profiles import profile_graph
from trappm.profiler.models.pool import build_pool
from trappm.reports.pools import pool_facts
from trappm.store import Store

ROOT = Path(__file__).parents[2]


def timed(what: str, work: Callable[[], Any]) -> Any:
    begin = time.perf_counter()
    result = work()
    print(f"{time.perf_counter() - begin:7.2f} s  {what}")
    return result


def main() -> None:
    """Prints the seconds of each part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", type=Path, default=ROOT / "examples" / "pool_paper.yaml")
    file = load_pool_file(parser.parse_args().spec)
    profile = profile_graph("test_resnet", 64)
    with (
        tempfile.TemporaryDirectory() as folder,
        Store.open(f"sqlite:///{folder}/labels.db") as store,
    ):
        pairs = sorted({(c.architecture, c.input_size) for c in build_pool(file.spec)})

        def store_profiles() -> None:
            for architecture, size in pairs:
                replace(profile, architecture=architecture, input_size=size).save(store)

        timed(f"{len(pairs)} static profiles stored, one transaction each", store_profiles)

        def watch(*_: object) -> None:
            pass

        timed("pool built: the whole of `trappm pool build`",
              lambda: build(store, file, address=None, processes=1, watch=watch))  # fmt: skip
        pool = timed("pool read back", lambda: store.pools.get(file.name))
        facts = timed("pool counted by family", lambda: pool_facts(store, file.name))
        templates = timed("graph templates read", lambda: store.workloads.graph_templates(pairs))
        steps = timed("step profiles read", lambda: store.workloads.step_profiles(pairs))
        assert len(pool) == facts.total.usable >= 25_000
        assert len(templates) == len(steps) == len(pairs)
        print(f"{len(pool)} configurations, {len(pairs)} static profiles")


if __name__ == "__main__":
    main()
