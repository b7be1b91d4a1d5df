"""Small real records for the store's tests."""

import dataclasses
import json
import sqlite3
from contextlib import contextmanager

import numpy as np
from sqlalchemy import create_engine, select

from trappm.profiler.records import (
    Configuration,
    GraphTemplate,
    Measurement,
    MemoryFormat,
    Outcome,
    Phase,
    Precision,
    Protocol,
    StepSummary,
)
from trappm.profiler.traced_step import (
    Allocations,
    Event,
    KernelTable,
    SavedBytes,
    Size,
    StepKernels,
    Trace,
)
from trappm.store import Assignment, OwnerProcess
from trappm.store.schema import METADATA

DEVICE = "cpu-2t"
ENVIRONMENT = {"device": DEVICE, "torch": "2.13.0", "host": "here", "load_average_before": 0.25}


def configuration(batch_size=1, architecture="resnet18", input_size=64, **fields):
    return Configuration(
        architecture=architecture, batch_size=batch_size, input_size=input_size, **fields
    )


def template(nodes=2, macs=10):
    sizes = {name: np.ones((nodes, 6), np.int64) for name in ("input_shapes", "output_shapes")}
    sizes |= {"macs": np.full(nodes, macs), "memory_bytes": np.ones(nodes, np.int64)}
    return GraphTemplate(
        operators=("Conv",) * nodes,
        edges=np.array([[0, 1]]),
        constant=sizes,
        slope=sizes,
        parameters=np.ones(nodes, np.int64),
    )


def trace(graph=None, frozen=0, **fields):
    """A small trace of a training step."""
    events = [Event.ALLOCATE, Event.END_OF_FORWARD, Event.FREE]
    allocations = Allocations(
        kinds=np.array(events, np.int8),
        blocks=np.array([0, 0, 0], np.int32),
        sizes=np.array([[512, 2048], [0, 0], [512, 2048]]),
        gradients=np.array([0], np.int32),
        parameter_bytes=np.array([256]),
        parameter_places=np.array([0]),
        element_bytes=np.array([4]),
        buffer_bytes=np.full(frozen, 4),
    )
    columns = {field.name: np.zeros(0, np.int64) for field in dataclasses.fields(KernelTable)}
    kernels = StepKernels(
        table=KernelTable(**columns | {"sizes": np.zeros((0, len(Size), 2), np.int64)}),
        parameter_tensors=1, parameters=6_000_000_000,  # of a giant: more than 32 bits
        precision=Precision.FP32, memory_format=MemoryFormat.CONTIGUOUS,
    )  # fmt: skip
    values = {
        "phase": Phase.TRAIN,
        "graph": graph or template(),
        "allocations": allocations,
        "kernels": kernels,
        "saved_bytes": SavedBytes(4096, 5_000_000_000),
    }
    return Trace(**values | fields)


def graph_only(refusal="its loss needs values", graph=None):
    """A trace of a step that could not be traced beyond its forward pass."""
    return trace(graph, allocations=None, kernels=None, refusal=refusal)


def measurement(what=None, outcome="ok", *, step_ms=12.5, protocol="quick", **fields):
    outcome = Outcome(outcome)
    ok = outcome is Outcome.OK
    step = StepSummary(median_ms=step_ms, mean_ms=step_ms + 0.1, iqr_ms=0.5, p95_ms=step_ms + 1)
    values = {
        "configuration": what or configuration(),
        "device": DEVICE,
        "outcome": outcome,
        "protocol": Protocol(name=protocol),
        "started_at": "2026-01-02T03:04:05.678901+00:00",
        "duration_s": 3.25,
        "step_samples_ms": (12.0, 12.5, 13.25) if ok else (),
        "step": step if ok else None,
        "memory_mib": 321.5 if ok else None,
        "memory_detail_mib": {"peak": 321.5} if ok else {},
        "missing": {"power_w": "no meter", "energy_j": "no meter"},
        "failed_in": None if ok else "measure",
        "message": None if ok else f"ended as {outcome}",
        "environment": ENVIRONMENT,
    }
    return Measurement(**(values | fields))


def planned(configurations, device=DEVICE, role="train"):
    return [
        Assignment(configuration=choice, device=device, role=role, rank=rank, reason={"score": 0.5})
        for rank, choice in enumerate(configurations)
    ]


def campaign_with(store, configurations, *, device=DEVICE, role="train"):
    """A running campaign with one round in which all these wait to be measured; its id."""
    campaign_id = store.campaigns.create("tiny", {"budget": 3}, 7).id
    store.campaigns.set_pool(campaign_id, [(member, False) for member in configurations])
    store.rounds.plan(campaign_id, 0, "initial", device, planned(configurations, device, role))
    store.owners.begin_campaign(campaign_id)
    return campaign_id


def states(store, campaign_id):
    return [(a.state, a.attempts, a.failures) for a in store.assignments.of_campaign(campaign_id)]


def lease_next(store, campaign_id, worker="w"):
    """Leases what is next; None if nothing is open."""
    return store.assignments.lease_next(campaign_id, DEVICE, worker)


def process(host="here", pid=1):
    """A process of a machine that is none of ours."""
    return OwnerProcess(host=host, pid=pid)


def owned(store, campaign_id, owner_id="o", gone=None):
    """The store as the owner of a campaign that is begun and claimed; another one may be gone."""
    store.owners.release(campaign_id, gone or "nobody")
    store.owners.begin_campaign(campaign_id)
    assert store.owners.claim_campaign(campaign_id, owner_id, process(owner_id))
    return store.as_owner(campaign_id, owner_id)


def measure_next(store, campaign_id, outcome="ok", worker="w", **fields):
    """Leases the next assignment, and records how its measurement ended."""
    lease = lease_next(store, campaign_id, worker)
    result = measurement(lease.configuration, outcome, attempt_key=lease.attempt_key, **fields)
    store.measurements.record([(result, lease.id)])
    return result


def contents(url):
    """Every row of every table, to see whether anything changed; JSON without its order."""
    engine = create_engine(url)
    with engine.connect() as connection:
        rows = {
            table.name: sorted(
                str([json.dumps(x, sort_keys=True) if isinstance(x, dict) else x for x in row])
                for row in connection.execute(select(table))
            )
            for table in METADATA.sorted_tables
        }
    engine.dispose()
    return rows


@contextmanager
def lost_reply(store, *, is_committed=True):
    """Let the next commit succeed, and lose the connection before its reply arrives.

    If it is not committed, the connection is lost before the commit.
    """
    dialect = store.database.engine.dialect
    do_commit = dialect.do_commit
    lost = []

    def commit(connection):
        if lost or is_committed:
            do_commit(connection)
        if lost:
            return
        lost.append(connection)
        if dialect.name == "sqlite":
            error = sqlite3.OperationalError("disk I/O is away")
            error.sqlite_errorname = "SQLITE_CANTOPEN"
            raise error
        connection.driver_connection.close()
        raise dialect.loaded_dbapi.OperationalError("consuming input failed")

    dialect.do_commit = commit
    try:
        yield
    finally:
        dialect.do_commit = do_commit
    assert lost


def fill_the_disk(opened):
    """Let SQLite take no more pages, until the function that this returns is called."""
    pool = opened.database.engine.pool
    connections = [pool.connect() for _ in range(pool.checkedin())]
    drivers = [connection.dbapi_connection for connection in connections]
    for connection in connections:
        connection.close()
    drivers[0].execute("VACUUM")  # no free pages are left

    def most_pages(count):
        for driver in drivers:
            driver.execute(f"PRAGMA max_page_count = {count}").fetchone()

    most_pages(1)
    return lambda: most_pages(1 << 30)
