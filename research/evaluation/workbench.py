"""Labels with their workloads, and predictors that can learn from them.

Missing graphs and step profiles are stored one by one, so that an interrupted run can continue.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache as cache_calls
from typing import Annotated, Any

import numpy as np
import typer

from research.evaluation.benchmark import PAPER_SEEDS, Samples
from research.peers.predictors import Surroundings, estimator_named
from trappm.cluster.pool_file import make_profiles, make_steps
from trappm.cluster.profiles import ProfiledGraph, StepCache, StepKey
from trappm.learner.estimator import Estimator
from trappm.learner.paper.encoder import Encoder, make_encoder
from trappm.learner.paper.presets import EncoderPreset
from trappm.learner.workload import Workload
from trappm.profiler.devices.catalogue import USABLE_SHARE, card_name
from trappm.profiler.errors import InputError
from trappm.profiler.records import Execution, GraphTemplate, Measurement, Pair, Watch
from trappm.profiler.records.graph import Graph
from trappm.profiler.records.step_scope import StepScope
from trappm.profiler.records.trace import StepProfile
from trappm.store import Home, Store

Processes = Annotated[int, typer.Option(help="Number of processes that trace models.")]
CORES = os.cpu_count() or 1


def show_progress(done: int, total: int, what: str) -> None:
    """Print the progress of a stage on standard error."""
    sys.stderr.write(f"{done}/{total} {what}\n")


OF_KERNELS = frozenset({"step_time_ms"})
"""Metrics with a prior that needs kernels; labels without kernels are left out."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """Samples, and the number of labels that were left out."""

    samples: Samples
    estimates_mib: Mapping[Workload, float]
    """FakeTensor estimates, if the labels include them."""
    device: str
    card: str
    """Card with the data sheet of the device, from the measurements if they name it."""
    left_out: Mapping[str, int]
    """Number of labels without a workload by reason."""


def _only_device(
    measurements: Sequence[Measurement], known: Sequence[Measurement], metric: str
) -> str:
    devices = sorted({m.device for m in known})
    if not known:
        raise InputError(f"none of the {len(measurements)} labels has {metric}; use another metric")
    if len(devices) != 1:
        raise InputError(
            f"the labels of {metric} are of {len(devices)} devices ({', '.join(devices)}); "
            "give labels of one device"
        )
    return devices[0]


def _bounds(measurement: Measurement, metric: str) -> tuple[float, float] | None:
    """Return value and lower bound of a metric, one of them NaN; None if neither is known."""
    value = getattr(measurement, metric)
    if value is not None:
        return float(value), np.nan
    capacity = measurement.memory_detail_mib.get("capacity") if metric == "memory_mib" else None
    return None if capacity is None else (np.nan, USABLE_SHARE * float(capacity))


def samples_of(
    rows: Sequence[tuple[Measurement, Workload]],
    metric: str,
    usable: Mapping[tuple[str, int], bool] | None = None,
) -> Samples:
    """Return measurements with their workloads as samples; `usable` as in `Workbench`."""
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


def _workloads(
    measurements: Sequence[Measurement],
    graphs: Mapping[Pair, bytes],
    steps: Mapping[Pair, bytes],
    keys: Mapping[str, StepKey],
    cache: StepCache,
) -> Iterator[tuple[Measurement, Workload | None]]:
    """Yield measurements with their workloads, None without a graph at their batch size."""
    templates = {pair: GraphTemplate.from_bytes(data) for pair, data in graphs.items()}
    stored = {pair: StepProfile.from_bytes(data) for pair, data in steps.items()}
    traced = {key: cache.get(key) for key in set(keys.values())}
    own = {key: StepProfile.from_bytes(data) for key, data in traced.items() if data}

    @cache_calls
    def graph_of(pair: Pair, batch_size: int) -> Graph:
        """Return one object for equal graphs, which share its caches."""
        return templates[pair].at(batch_size)

    for measurement in measurements:
        what, key = measurement.configuration, keys[measurement.attempt_key]
        pair = what.architecture, what.input_size
        try:
            graph = graph_of(pair, what.batch_size)
        except (KeyError, InputError):
            yield measurement, None
            continue
        step = own.get(key) or stored.get(pair)
        known = step is not None and (key.is_plain or key in own)
        yield (
            measurement,
            workload_of(
                measurement, graph, step=step, kernels=step.kernels if step and known else None
            ),
        )


def workload_of(measurement: Measurement, graph: Graph, **given: Any) -> Workload:
    """Return the workload of a measurement with its graph and other given fields."""
    what = measurement.configuration
    return Workload(
        graph=graph,
        precision=what.precision,
        memory_format=what.memory_format,
        optimizer=what.optimizer,
        phase=what.phase,
        scope=StepScope.of(measurement.environment),
        **given,
    )


def step_keys(
    measurements: Sequence[Measurement],
    cache: StepCache,
    processes: int,
    watch: Watch,
    stored: Mapping[Pair, bytes],
) -> dict[str, StepKey]:
    """Trace the steps that the store lacks, and return the keys of all measurements by attempt."""
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
    """Return whether attention is fused: from PyTorch 2 on; an unknown version counts as new."""
    torch = str(measurement.environment.get("torch", "2"))
    return not torch.startswith(("0.", "1."))


@dataclass(frozen=True, kw_only=True, eq=False)
class Workbench:
    """The user's data folder, whose label store keeps the profiles, to prepare labels."""

    metric: str
    """Column of the metric."""
    processes: int
    """Number of processes that trace."""
    usable: Mapping[tuple[str, int], bool] | None = None
    """True for spikes, by architecture and batch size; only listed rows are evaluated."""
    watch: Watch = show_progress
    home: Home = field(default_factory=Home.open)

    def prepared(self, measurements: Sequence[Measurement]) -> Prepared:
        """Return the labels of the metric with their workloads; trace missing ones.

        Raises:
            InputError: The labels are of several devices, or none has a graph.
            TrappmError: The store cannot be written, or tracing failed.
        """
        metric, cache = self.metric, StepCache(self.home.step_profiles)
        eager = [m for m in measurements if m.configuration.execution is Execution.EAGER]
        known = [m for m in eager if _bounds(m, metric) is not None]
        device = _only_device(measurements, known, metric)
        left_out = Counter({"no such metric": len(eager) - len(known)})
        left_out["compiled"] = len(measurements) - len(eager)
        pairs = sorted({(m.configuration.architecture, m.configuration.input_size) for m in known})

        def show(done: int, total: int, profile: ProfiledGraph | None) -> None:
            if profile is not None:
                self.watch(done, total, f"static profile of {profile.architecture}")

        with Store.open(self.home.database_url) as store:
            make_profiles(store, pairs, address=None, processes=self.processes, watch=show)
            stored = store.workloads.step_profiles(pairs)
            graphs = store.workloads.graph_templates(pairs)
        keys = step_keys(known, cache, self.processes, self.watch, stored=stored)
        needs_kernels = metric in OF_KERNELS
        rows = []
        for measurement, workload in _workloads(known, graphs, stored, keys, cache):
            if workload is None:
                left_out["no graph"] += 1
            elif needs_kernels and workload.kernels is None:
                left_out["no kernels"] += 1
            else:
                rows.append((measurement, workload))
        if not rows:
            raise InputError(
                f"none of the {len(known)} labels of {metric} has a "
                f"{'graph with kernels' if needs_kernels else 'graph'}"
            )
        return Prepared(
            samples=samples_of(rows, metric, self.usable),
            estimates_mib={
                workload: m.memory_detail_mib["floor"]
                for m, workload in rows
                if "floor" in m.memory_detail_mib
            },
            device=device,
            card=card_name(device, (m.environment for m in known)),
            left_out={reason: count for reason, count in left_out.items() if count},
        )

    def encoder(self, samples: Samples, preset: EncoderPreset, *, pretrained: bool) -> Encoder:
        """Return an encoder of the samples' graphs."""
        return make_encoder(
            [workload.graph for workload in samples.workloads],
            samples.architectures,
            preset,
            pretrained=pretrained,
            seed=PAPER_SEEDS[0],
            cache=self.home.path / "encoders",
            on_progress=lambda done, total: self.watch(done, total, "pre-training the encoder"),
        )

    def estimator(self, name: str, prepared: Prepared, size: str = "laptop") -> Estimator:
        """Return the predictor of this name for these labels.

        Raises:
            InputError: The name is unknown, or the labels lack an input of the predictor.
        """
        given = Surroundings(
            metric=self.metric,
            card=prepared.card,
            make_encoder=lambda preset, pretrained: self.encoder(
                prepared.samples, preset, pretrained=pretrained
            ),
            estimates_mib=prepared.estimates_mib,
            size=size,
        )
        return estimator_named(name, given)
