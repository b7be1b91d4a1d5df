"""Seconds to build the paper's pool of 25,000 configurations once the graphs exist.

    python benchmarks/pool.py [--spec examples/pool_paper.yaml]

Every pair of an architecture and an input size gets the graph of one small model, so that what is
timed is the pool: reading the file, making the configurations, storing them and reading them back.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.pool import build, load_pool_file
from profiler.pool import build_pool
from profiler.static import graph_template
from store import Store
from trappm.pools import pool_facts

ROOT = Path(__file__).parents[1]


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
    template = graph_template("test_resnet", 64).to_bytes()
    with (
        tempfile.TemporaryDirectory() as folder,
        Store.open(f"sqlite:///{folder}/labels.db") as store,
    ):
        pairs = sorted({(c.architecture, c.input_size) for c in build_pool(file.spec)})
        timed(f"{len(pairs)} graphs stored, one transaction each",
              lambda: [store.save_graph(*pair, template, None) for pair in pairs])  # fmt: skip

        def watch(*_: object) -> None:
            pass

        timed("pool built: the whole of `trappm pool build`",
              lambda: build(store, file, address=None, processes=1, watch=watch))  # fmt: skip
        pool = timed("pool read back", lambda: store.pool(file.name))
        facts = timed("pool counted by family", lambda: pool_facts(store, file.name))
        templates = timed("graph templates read", lambda: store.graph_templates(pairs))
        assert len(pool) == facts["total"]["usable"] >= 25_000
        assert len(templates) == len(pairs)
        print(f"{len(pool)} configurations, {len(pairs)} graphs")


if __name__ == "__main__":
    main()
