"""Labels with their workloads, and predictors that can learn from them.

Missing traces are stored one by one, so that an interrupted run can continue.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache as cache_calls
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from research.evaluation.benchmark import PAPER_SEEDS, Samples
from research.peers.predictors import Surroundings, estimator_named
from trappm.cluster.pool_file import make_traces
from trappm.learner.interface import Estimator, Workload
from trappm.learner.paper.encoder import Encoder, make_encoder
from trappm.learner.paper.presets import EncoderPreset
from trappm.learner.snapshots.registry import Registry
from trappm.profiler.devices.catalogue import USABLE_SHARE, card_name
from trappm.profiler.errors import InputError
from trappm.profiler.records import Execution, Graph, Measurement, Watch
from trappm.profiler.records.step_scope import StepScope
from trappm.profiler.traced_step import Trace, TraceFolder, TraceKey
from trappm.store import Home

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
    measurements: Sequence[Measurement], steps: Mapping[TraceKey, Trace]
) -> Iterator[tuple[Measurement, Workload | None]]:
    """Yield measurements with their workloads, None without a graph at their batch size."""
    graphs = {key[:2]: step.graph for key, step in steps.items() if step.graph is not None}

    @cache_calls
    def graph_of(model: str, input_size: int, batch_size: int) -> Graph:
        """Return one object for equal graphs, which share its caches."""
        return graphs[model, input_size].at(batch_size)

    for measurement in measurements:
        what, step = measurement.configuration, steps.get(key_of(measurement))
        try:
            graph = graph_of(what.architecture, what.input_size, what.batch_size)
        except (KeyError, InputError):
            yield measurement, None
            continue
        if step is None or step.allocations is None:
            yield measurement, workload_of(measurement, graph)
        else:
            yield measurement, workload_of(measurement, graph, trace=step, kernels=step.kernels)


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


def traced_steps(
    measurements: Sequence[Measurement], folder: Path, processes: int, watch: Watch
) -> dict[TraceKey, Trace]:
    """Return the steps of the measurements by `key_of`, without those that cannot be traced.

    Args:
        measurements: Measurements of any models.
        folder: Folder of traces, in which missing ones are made.
        processes: Number of processes that trace.
        watch: Called with each step that was traced.
    """
    cache, keys = TraceFolder(folder), sorted(set(map(key_of, measurements)))
    missing = cache.missing(keys)
    for done, traced in enumerate(make_traces(cache, missing, processes=processes)):
        watch(done, len(missing), f"a step of {traced.key.model}")
    made = {key: cache.get(key) for key in keys}
    return {key: step for key, step in made.items() if isinstance(step, Trace)}


def key_of(measurement: Measurement) -> TraceKey:
    """Return the key of the measured step.

    Attention is fused from PyTorch 2 on; an unknown version counts as new.
    """
    torch = str(measurement.environment.get("torch", "2"))
    fused_attention = not torch.startswith(("0.", "1."))
    return TraceKey.of(measurement.configuration, fused_attention=fused_attention)


@dataclass(frozen=True, kw_only=True, eq=False)
class Workbench:
    """The user's data folder, which keeps the traces, to prepare labels."""

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
            CampaignError: Tracing failed.
        """
        metric = self.metric
        eager = [m for m in measurements if m.configuration.execution is Execution.EAGER]
        known = [m for m in eager if _bounds(m, metric) is not None]
        device = _only_device(measurements, known, metric)
        left_out = Counter({"no such metric": len(eager) - len(known)})
        left_out["compiled"] = len(measurements) - len(eager)
        steps = traced_steps(known, self.home.traces, self.processes, self.watch)
        needs_kernels = metric in OF_KERNELS
        rows = []
        for measurement, workload in _workloads(known, steps):
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
            cache=Registry(self.home.path / "encoders"),
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
