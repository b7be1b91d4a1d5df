"""Pool files, and building pools from them: configurations with their traced steps.

A pool file is a short YAML file that names a pool and lists its groups. Building can be stopped or
killed at any moment and started again: what is in the store is not made twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from trappm.cluster.ray_runtime import ray_runtime
from trappm.cluster.spec import load_file
from trappm.cluster.trace_tasks import Traced, TraceTasks, steps_of
from trappm.profiler.models.pool import PoolGroup, PoolSpec, build_pool
from trappm.profiler.traced_step import TraceCache, TraceKey
from trappm.store import Store


class PoolFile(BaseModel):
    """A pool under a name, by which campaigns refer to it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    groups: tuple[PoolGroup, ...]

    @property
    def spec(self) -> PoolSpec:
        return PoolSpec(groups=self.groups)


def load_pool_file(path: Path) -> PoolFile:
    """Load a file; raise InputError if it cannot be read or is not a valid pool file."""
    return load_file(path, PoolFile, kind="pool")


def store_pool(store: Store, file: PoolFile) -> list[TraceKey]:
    """Store a pool, and return its distinct steps.

    Raises:
        InputError: An architecture or family that does not exist, or a pool that is too large.
    """
    configurations = build_pool(file.spec)
    store.pools.save(file.name, configurations)
    return steps_of(configurations)


def make_traces(
    cache: TraceCache, keys: Sequence[TraceKey], *, address: str | None = None, processes: int
) -> Iterator[Traced]:
    """Trace steps and keep them as they are made; yield them in the order of completion.

    Args:
        cache: Home of the traces.
        keys: Steps to trace, whether the cache has them or not.
        address: Address of a running Ray cluster that does the work; None: this machine.
        processes: Number of steps traced at once on this machine.

    Raises:
        CampaignError: The cluster cannot be reached.
    """
    if not keys:
        return
    with ray_runtime(address):
        for traced in TraceTasks(keys, at_once=processes if address is None else None):
            traced.keep(cache)
            yield traced
