"""What a campaign may choose from, and whether that is enough for its budget."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trappm.cluster.spec import CampaignSpec
from trappm.learner.stats.errors import split_architectures
from trappm.learner.stats.folds import content_groups
from trappm.learner.workload import Workload
from trappm.profiler.errors import InputError
from trappm.profiler.models.pool import build_pool
from trappm.profiler.records import Configuration, Graph, GraphTemplate
from trappm.profiler.transformers.names import model_of
from trappm.store import Store


def pool_of(spec: CampaignSpec, store: Store) -> list[Configuration]:
    """The configurations that a campaign file describes, or that its named pool has now.

    Raises:
        UnknownArchitectureError: a name or glob in the file matches no timm architecture.
        InputError: there is no pool of this name.
    """
    return store.pools.get(spec.pool) if isinstance(spec.pool, str) else build_pool(spec.pool)


def without_refused(pool: Sequence[Configuration], store: Store) -> list[Configuration]:
    """Those of which a graph can be made, as far as it has been tried."""
    refused = {(r.architecture, r.input_size) for r in store.workloads.refusals()}
    return [c for c in pool if (c.architecture, c.input_size) not in refused]


def check_stop(spec: CampaignSpec) -> None:
    """Raises InputError for a budget of labels that ends before anything can be learned from."""
    budget = None if spec.stop is None else spec.stop.labels
    first = sum(sum(spec.shares(device)[:2]) for device in spec.devices.keys)
    if budget is not None and budget < first:
        raise InputError(
            f"the stop rule labels is {budget}, and evaluation and initial alone ask for {first}; "
            "raise it or lower them"
        )


def twins_of(pool: Sequence[Configuration], store: Store) -> list[str]:
    """With whom each configuration is held out: names of the same layers are one, once the store
    has their graphs."""
    templates = store.workloads.graph_templates([(c.architecture, c.input_size) for c in pool])
    workload_of = {
        architecture: Workload(graph=GraphTemplate.from_bytes(data).at(1))
        for (architecture, _), data in templates.items()
    }
    unknown = Workload(graph=Graph.empty(1))
    names = [c.architecture for c in pool]
    return content_groups(names, [workload_of.get(name, unknown) for name in names])


def check_budget(
    spec: CampaignSpec, pool: Sequence[Configuration], twins: Sequence[str] | None = None
) -> set[str]:
    """The architectures to hold out of this pool.

    Args:
        spec: the campaign file.
        pool: (n).
        twins: with whom each configuration is held out (n); by default its model, however trained.

    Raises:
        InputError: the pool is too small for the budget.
    """
    generator = np.random.default_rng([spec.seed, 0])
    groups = [model_of(c.architecture) for c in pool] if twins is None else twins
    held_out = split_architectures(pool, spec.evaluation.architecture_share, generator, groups)
    kept_back = sum(c.architecture in held_out for c in pool)
    for device in spec.devices.keys:
        wanted, *others = spec.shares(device)
        training = sum(others)
        if wanted > kept_back or training > len(pool) - kept_back:
            raise InputError(
                f"the budget for {device} cannot be met: it asks for {wanted} evaluation and "
                f"{training} training configurations, and the pool has {kept_back} and "
                f"{len(pool) - kept_back}; lower the budget or widen the pool"
            )
    return held_out
