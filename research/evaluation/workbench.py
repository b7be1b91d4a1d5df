"""Labels with their workloads, and predictors that can learn from them.

Missing graphs and step profiles are stored one by one, so that an interrupted run can continue.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

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
from trappm.profiler.records import GraphTemplate, Measurement, Pair, Watch
from trappm.profiler.records.graph import Graph
from trappm.profiler.records.step_scope import StepScope
from trappm.profiler.simulation.step_profile import StepProfile
from trappm.store import Home, Store


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
    """Factory of workloads; equal graphs share one object and its caches."""

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
        own = {key: cache.get(key) for key in set(keys.values())}
        self._own = {k: StepProfile.from_bytes(data) for k, data in own.items() if data}
        self._graphs: dict[Pair, dict[int, Graph]] = defaultdict(dict)

    def workload(self, measurement: Measurement) -> Workload:
        """Return the workload of a measurement.

        Raises:
            KeyError: The graph is missing.
            InputError: The graph is missing at this batch size.
        """
        what = measurement.configuration
        pair = what.architecture, what.input_size
        graphs = self._graphs[pair]
        if what.batch_size not in graphs:
            graphs[what.batch_size] = self._templates[pair].at(what.batch_size)
        key = self._keys[measurement.attempt_key]
        step = self._own.get(key) or self._steps.get(pair)
        known = step is not None and (key.is_plain or key in self._own)
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
    """A data folder with its open store, to prepare labels for experiments."""

    home: Home
    store: Store
    metric: str
    """Column of the metric."""
    processes: int
    """Number of processes that trace."""
    encoder_seed: int
    usable: Mapping[tuple[str, int], bool] | None
    """True for spikes, by architecture and batch size; only listed rows are evaluated."""
    watch: Watch

    def prepared(self, measurements: Sequence[Measurement]) -> Prepared:
        """Return the labels of the metric with their workloads; trace missing ones.

        Raises:
            InputError: The labels are of several devices, or none has a graph.
            TrappmError: The store cannot be written, or tracing failed.
        """
        metric, store, cache = self.metric, self.store, StepCache(self.home.step_profiles)
        known = [m for m in measurements if _bounds(m, metric) is not None]
        device = _only_device(measurements, known, metric)
        left_out = Counter({"no such metric": len(measurements) - len(known)})
        pairs = sorted({(m.configuration.architecture, m.configuration.input_size) for m in known})

        def show(done: int, total: int, profile: ProfiledGraph | None) -> None:
            if profile is not None:
                self.watch(done, total, f"static profile of {profile.architecture}")

        make_profiles(store, pairs, address=None, processes=self.processes, watch=show)
        stored = store.workloads.step_profiles(pairs)
        keys = step_keys(known, cache, self.processes, self.watch, stored=stored)
        maker = _Workloads(store.workloads.graph_templates(pairs), stored, keys, cache)
        needs_kernels = metric in OF_KERNELS
        rows = []
        for measurement in known:
            try:
                workload = maker.workload(measurement)
            except (KeyError, InputError):
                left_out["no graph"] += 1
                continue
            if needs_kernels and workload.kernels is None:
                left_out["no kernels"] += 1
            else:
                rows.append((measurement, workload))
        if not rows:
            raise InputError(
                f"none of the {len(known)} labels of {metric} has a "
                f"{'graph with kernels' if needs_kernels else 'graph'}"
            )
        return Prepared(
            samples=_samples(rows, metric, self.usable),
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
        """Return an encoder of the samples' graphs; it needs no open store."""
        return make_encoder(
            [workload.graph for workload in samples.workloads],
            samples.architectures,
            preset,
            pretrained=pretrained,
            seed=self.encoder_seed,
            cache=self.home.path / "encoders",
            on_progress=lambda done, total: self.watch(done, total, "pre-training the encoder"),
        )

    def estimator(self, name: str, prepared: Prepared, size: str = "laptop") -> Estimator:
        """Return the predictor of this name for these labels; it needs no open store.

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


@contextmanager
def opened_workbench(
    metric: str,
    *,
    processes: int,
    watch: Watch = show_progress,
    encoder_seed: int = PAPER_SEEDS[0],
    usable: Mapping[tuple[str, int], bool] | None = None,
) -> Iterator[Workbench]:
    """Open the workbench of the user's data folder.

    Raises:
        StoreError: The label store, which contains the profiles, cannot be used.
    """
    home = Home.open()
    with Store.open(home.database_url) as store:
        yield Workbench(
            home=home, store=store, metric=metric, processes=processes,
            encoder_seed=encoder_seed, usable=usable, watch=watch,
        )  # fmt: skip
