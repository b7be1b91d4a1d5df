"""Pool files, and building pools from them: configurations with their static profiles.

A pool file is a short YAML file that names a pool and lists its groups. Building can be stopped or
killed at any moment and started again: what is in the store is not made twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from trappm.cluster.profiles import ProfiledGraph, StepCache, StepKey, TracedStep
from trappm.cluster.ray_runtime import ray_runtime
from trappm.cluster.yaml_file import load
from trappm.profiler.models.pool import PoolGroup, PoolSpec, build_pool
from trappm.profiler.records import Pair
from trappm.store import Store

Watch = Callable[[int, int, ProfiledGraph | None], None]
"""Called with static profiles done, their number in all, and the one that was made last."""


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
    return load(path, PoolFile, kind="pool")


def store_pool(store: Store, file: PoolFile) -> list[Pair]:
    """Store a pool, and return its architectures with their input sizes.

    Raises:
        InputError: An architecture or family that does not exist, or a pool that is too large.
    """
    configurations = build_pool(file.spec)
    store.pools.save(file.name, configurations)
    return sorted({(c.architecture, c.input_size) for c in configurations})


def make_profiles(
    store: Store,
    pairs: Sequence[Pair],
    *,
    address: str | None,
    processes: int,
    watch: Watch,
    retry_refused: bool = False,
) -> None:
    """Make the static profiles that are missing; each is stored as it is made.

    Args:
        store: Store of profiles and refusals.
        pairs: Architectures with their input sizes.
        address: Address of a running Ray cluster that does the work; None: this machine.
        processes: Number of profiles made at once on this machine.
        watch: Called with the progress.
        retry_refused: Try again what was refused, as a newer version may support it.

    Raises:
        CampaignError: The cluster cannot be reached.
    """
    missing = store.workloads.pairs_to_profile(pairs, also_refused=retry_refused)
    done = len(pairs) - len(missing)
    watch(done, len(pairs), None)
    if not missing:
        return
    for profile in _profiled(missing, address, processes):
        profile.save(store)
        done += 1
        watch(done, len(pairs), profile)


def make_steps(
    cache: StepCache, keys: Sequence[StepKey], *, processes: int
) -> Iterator[TracedStep]:
    """Trace steps on this machine and keep them; yield them in the order of completion."""
    if not keys:
        return
    with ray_runtime(None):
        from trappm.cluster.profiles import trace_on_ray

        for traced in trace_on_ray(keys, processes):
            if traced.is_final:
                cache.put(traced)
            yield traced


def _profiled(
    pairs: Sequence[Pair], address: str | None, processes: int
) -> Iterator[ProfiledGraph]:
    with ray_runtime(address):
        from trappm.cluster.profiles import profile_on_ray

        yield from profile_on_ray(pairs, processes if address is None else None)
