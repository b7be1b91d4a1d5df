"""From labels to what predictors learn from: every label beside its workload.

Graphs and step profiles are made where they are missing and kept, each as it
comes, so a run that was stopped goes on where it was.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from research.evaluation.benchmark import Samples
from trappm.cluster.pool_file import make_profiles, make_steps
from trappm.cluster.profiles import ProfiledGraph, StepCache, StepKey
from trappm.learner.workload import Workload
from trappm.profiler.devices.capacity import USABLE_SHARE
from trappm.profiler.devices.catalogue import card_name
from trappm.profiler.errors import InputError
from trappm.profiler.progress import Watch
from trappm.profiler.records import GraphTemplate, Measurement, Pair
from trappm.profiler.records.graph import Graph
from trappm.profiler.records.step_scope import StepScope
from trappm.profiler.simulation.step_profile import StepProfile
from trappm.store import Store

OF_KERNELS = frozenset({"step_time_ms"})
"""Metrics that our prior explains by kernels: labels without them are left out for all."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """Samples, and what was left out."""

    samples: Samples
    estimates_mib: Mapping[Workload, float]
    """FakeTensor's, where the labels came with them."""
    device: str
    card: str
    """Behind the device's key, where measurements name it: whose data sheet counts."""
    left_out: Mapping[str, int]
    """Labels by the reason why there is no workload for them."""


def prepare(
    measurements: Sequence[Measurement],
    metric: str,
    store: Store,
    cache: StepCache,
    *,
    processes: int,
    usable: Mapping[tuple[str, int], bool] | None = None,
    watch: Watch = lambda done, total, what: None,
) -> Prepared:
    """Prepares the labels of one metric with their workloads.

    Args:
        measurements: of one device; those without the metric are left out.
        metric: its column, such as `memory_mib`.
        store: where graphs and step profiles are read and kept.
        cache: where steps in settings of their own are.
        processes: how many profile at once.
        usable: by architecture and batch size, whether it is a spike: only these are judged.
        watch: called with progress.

    Raises:
        InputError: there are several devices, or no label of the metric has a graph.
        TrappmError: the store cannot be written, or tracing broke off.
    """
    known = [m for m in measurements if _bounds(m, metric) is not None]
    device = _only_device(measurements, known, metric)
    left_out = Counter({"no such metric": len(measurements) - len(known)})
    pairs = sorted({(m.configuration.architecture, m.configuration.input_size) for m in known})
    _make_profiles(pairs, store, processes, watch)
    explained = metric in OF_KERNELS
    steps = store.workloads.step_profiles(pairs)
    keys = step_keys(known, cache, processes, watch, stored=steps)
    maker = _Workloads(store.workloads.graph_templates(pairs), steps, keys, cache)
    rows = _beside_workloads(known, maker, left_out, kernels_needed=explained)
    if not rows:
        raise InputError(
            f"there is no {'graph with kernels' if explained else 'graph'} of any of the "
            f"{len(known)} labels of {metric}"
        )
    return Prepared(
        samples=_samples(rows, metric, usable),
        estimates_mib={
            workload: m.memory_detail_mib["floor"]
            for m, workload in rows
            if "floor" in m.memory_detail_mib
        },
        device=device,
        card=card_name(device, (m.environment for m in known)),
        left_out={reason: count for reason, count in left_out.items() if count},
    )


def _make_profiles(pairs: Sequence[Pair], store: Store, processes: int, watch: Watch) -> None:
    def show(done: int, total: int, profile: ProfiledGraph | None) -> None:
        if profile is not None:
            watch(done, total, f"static profile of {profile.architecture}")

    make_profiles(store, pairs, address=None, processes=processes, watch=show)


def _only_device(
    measurements: Sequence[Measurement], known: Sequence[Measurement], metric: str
) -> str:
    devices = sorted({m.device for m in known})
    if not known:
        raise InputError(f"none of the {len(measurements)} labels has {metric}; ask for another")
    if len(devices) != 1:
        raise InputError(
            f"there are labels of {metric} of {len(devices)} devices ({', '.join(devices)}); "
            "give those of one"
        )
    return devices[0]


def _beside_workloads(
    known: Sequence[Measurement],
    maker: _Workloads,
    left_out: Counter[str],
    *,
    kernels_needed: bool,
) -> list[tuple[Measurement, Workload]]:
    """Labels with their workloads; those without one are counted in `left_out`, by reason."""
    rows = []
    for measurement in known:
        try:
            workload = maker.workload(measurement)
        except (KeyError, InputError):
            left_out["no graph"] += 1
            continue
        if kernels_needed and workload.kernels is None:
            left_out["no kernels"] += 1
            continue
        rows.append((measurement, workload))
    return rows


def _bounds(measurement: Measurement, metric: str) -> tuple[float, float] | None:
    """Value and lower bound of a metric, one of which is NaN; None if neither is known."""
    value = getattr(measurement, metric)
    if value is not None:
        return float(value), np.nan
    capacity = measurement.memory_detail_mib.get("capacity") if metric == "memory_mib" else None
    return None if capacity is None else (np.nan, USABLE_SHARE * float(capacity))


def _samples(
    rows: Sequence[tuple[Measurement, Workload]],
    metric: str,
    usable: Mapping[tuple[str, int], bool] | None,
) -> Samples:
    bounds = [_bounds(m, metric) or (np.nan, np.nan) for m, _ in rows]
    configurations = [m.configuration for m, _ in rows]
    places = [(c.architecture, c.batch_size) for c in configurations]
    values, above = np.array(bounds).T
    judged = ~np.isnan(values)
    if usable is not None:
        judged &= np.array([place in usable for place in places])
    return Samples(
        configurations=configurations,
        workloads=[workload for _, workload in rows],
        values=values,
        above=above,
        judged=judged,
        spiked=np.array([bool(usable and usable.get(place)) for place in places]),
    )


class _Workloads:
    """Makes workloads; equal graphs are one object, so that what is cached by graph is shared."""

    def __init__(
        self,
        templates: Mapping[Pair, bytes],
        steps: Mapping[Pair, bytes],
        keys: Mapping[str, StepKey],
        cache: StepCache,
    ) -> None:
        self._templates = {p: GraphTemplate.from_bytes(data) for p, data in templates.items()}
        self._steps = {p: StepProfile.from_bytes(data) for p, data in steps.items()}
        self._keys = keys
        self._own = {key: cache.get(key) for key in set(keys.values())}
        self._graphs: dict[Pair, dict[int, Graph]] = defaultdict(dict)

    def workload(self, measurement: Measurement) -> Workload:
        """Raises KeyError or InputError where there is no graph, or none at this batch size."""
        what = measurement.configuration
        pair = what.architecture, what.input_size
        graphs = self._graphs[pair]
        if what.batch_size not in graphs:
            graphs[what.batch_size] = self._templates[pair].at(what.batch_size)
        key = self._keys[measurement.attempt_key]
        step = self._own[key] or self._steps.get(pair)
        known = step is not None and (key.is_plain or self._own[key] is not None)
        return Workload(
            graph=graphs[what.batch_size],
            precision=what.precision,
            memory_format=what.memory_format,
            optimizer=what.optimizer,
            phase=what.phase,
            scope=StepScope.of(measurement.environment),
            step=step,
            kernels=step.kernels if step is not None and known else None,
        )


def step_keys(
    measurements: Sequence[Measurement],
    cache: StepCache,
    processes: int,
    watch: Watch,
    stored: Mapping[Pair, bytes],
) -> dict[str, StepKey]:
    """The keys of all measurements by attempt, once all that the store lacks are traced."""
    keys = {
        m.attempt_key: StepKey.of(m.configuration, fused_attention=_fuses_attention(m))
        for m in measurements
    }
    wanted = {
        key
        for key in keys.values()
        if not (key.is_plain and (key.architecture, key.input_size) in stored)
    }
    missing = cache.missing(sorted(wanted))
    if missing:
        for done, traced in enumerate(make_steps(cache, missing, processes=processes)):
            watch(done, len(missing), f"a step of {traced.key.architecture}")
    return keys


def _fuses_attention(measurement: Measurement) -> bool:
    """PyTorch has fused attention from version 2 on; an untold version is taken to be new."""
    torch = str(measurement.environment.get("torch", "2"))
    return not torch.startswith(("0.", "1."))
