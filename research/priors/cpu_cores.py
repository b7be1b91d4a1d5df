"""Errors of heads of CPU cores on the pool of the preset `laptop` (docs/research/cpu_cores.md).

Every configuration of the pool was measured on two threads and on one thread of two hosts, and some
of them again (`examples/data/cpu`). Each split holds a fifth of the architectures out. As in a
campaign, 40 labels of the source and few of the target are drawn from the rest; all held-out ones
are judged: the median and, in brackets, the mean over splits of the mean absolute percentage error.
With `--beyond`, heads learn from the smallest labels of two thirds of the architectures; the
coverage of the others' intervals is counted by how far beyond these labels the prediction lies,
widened for that distance as heads do it, and not widened.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated

import numpy as np
import numpy.typing as npt
import pandas as pd
import typer

from research.held_out import Array
from research.snapshot.shipped_sheets import our_attempts
from trappm.learner.estimator import Targets
from trappm.learner.heads.metric_head import Head, Ours, starting_prior
from trappm.learner.physics.device_specs import CPU
from trappm.learner.physics.graph_prior import GraphPrior
from trappm.learner.physics.memory_prior import MemoryPrior
from trappm.learner.physics.prior import Prior
from trappm.learner.stats.folds import content_groups
from trappm.learner.workload import Workload
from trappm.profiler.records import Configuration, Measurement, Outcome
from trappm.profiler.static_profile import static_profile

Rows = npt.NDArray[np.int64]
METRICS = ("step_time_ms", "memory_mib")
SOURCE_LABELS, TARGET_LABELS = 40, (6, 10, 18, 40, 150)
HELD_OUT = 0.2
LEAST_SHARES = (0.06, 0.1, 0.15, 0.25, 0.35, 0.5, 0.75)
"""Shares of the labels, from the smallest, that heads learn from in extrapolation tests."""
BEYOND = (0.0, 1.0, 2.0, 3.0, 5.0, 10.0, 15.0, np.inf)
"""Bounds between which coverage is counted, as multiples of the largest label."""
GENERAL: Mapping[str, Prior] = {
    "step_time_ms": GraphPrior("step_time_ms"),
    "memory_mib": MemoryPrior.on(CPU),
}
"""Formulas that are not specific to CPUs."""
Measured = Mapping[Configuration, Measurement]


@dataclass(frozen=True, eq=False)
class Pool:
    """Configurations (n) with their workloads, and first and second measurements by device."""

    configurations: Sequence[Configuration]
    workloads: Sequence[Workload]
    first: Mapping[str, Measured]
    again: Mapping[str, Measured]

    @cached_property
    def groups(self) -> npt.NDArray[np.str_]:
        """Group that each configuration is held out with: names of the same layers are one."""
        return np.array(
            content_groups([c.architecture for c in self.configurations], self.workloads)
        )

    def values(self, device: str, metric: str) -> Array:
        """Return the labels of a device in the metric's unit, shape (n,)."""
        return np.array([_value(self.first[device][c], metric) for c in self.configurations])

    def at(self, rows: Rows) -> list[Workload]:
        return [self.workloads[i] for i in rows.tolist()]

    def fit(
        self, prior: Prior, device: str, metric: str, rows: Rows, seed: int,
        start: Head[Prior] | None = None,
    ) -> Head[Prior]:  # fmt: skip
        """Train a head on the labels of these rows."""
        values = self.values(device, metric)[rows]
        targets = Targets(values, np.full(len(rows), np.nan), self.groups[rows].tolist())
        return Ours(prior).fit(self.at(rows), targets, np.random.default_rng(seed), start)

    def error(self, log_predicted: Array, device: str, metric: str, rows: Rows) -> float:
        """Return the mean absolute percentage error on these rows."""
        ratios = np.exp(log_predicted) / self.values(device, metric)[rows]
        return float(100 * np.abs(ratios - 1).mean())

    def splits(self, count: int) -> Iterator[tuple[int, Rows, Rows, np.random.Generator]]:
        """Yield seed, held-out rows, all other rows and the generator of each split."""
        distinct = np.unique(self.groups)
        for seed in range(count):
            generator = np.random.default_rng(seed)
            names = generator.permutation(distinct)[: round(HELD_OUT * len(distinct))]
            is_judged = np.isin(self.groups, names)
            yield seed, np.flatnonzero(is_judged), np.flatnonzero(~is_judged), generator


def load(devices: Sequence[str]) -> Pool:
    """Return the configurations with labels on all devices, with traced models."""
    first: dict[str, Measured] = {}
    again: dict[str, Measured] = {}
    for device in devices:
        attempts = our_attempts(f"cpu/{device}.jsonl.xz")
        stable = [m for m in attempts if m.outcome is Outcome.OK]
        unstable = [m for m in attempts if m.outcome is Outcome.UNSTABLE and m.step is not None]
        known, repeated = dict[Configuration, Measurement](), dict[Configuration, Measurement]()
        for m in stable:
            if known.setdefault(m.configuration, m) is not m:
                repeated.setdefault(m.configuration, m)
        first[device] = {m.configuration: m for m in reversed(unstable)} | known
        again[device] = repeated
    configurations = sorted(
        set.intersection(*(set(of_device) for of_device in first.values())),
        key=lambda c: (c.architecture, c.input_size, c.batch_size),
    )
    pairs = dict.fromkeys((c.architecture, c.input_size) for c in configurations)
    profiles = {pair: static_profile(*pair) for pair in pairs}
    workloads = []
    for c in configurations:
        profile = profiles[c.architecture, c.input_size]
        kernels = profile.step.kernels_in(c.precision, c.memory_format)
        graph = profile.graph.at(c.batch_size)
        workloads.append(Workload(graph=graph, step=profile.step, kernels=kernels))
    return Pool(configurations, workloads, first, again)


def _value(measurement: Measurement, metric: str) -> float:
    if metric == "memory_mib":
        assert measurement.memory_mib is not None
        return measurement.memory_mib
    assert measurement.step is not None
    return measurement.step.median_ms


def repeats(pool: Pool, device: str, metric: str) -> str:
    """Describe the differences of second measurements: common factor and remainder."""
    pairs = [(pool.first[device][c], m) for c, m in pool.again[device].items()]
    ratios = np.array([_value(b, metric) / _value(a, metric) for a, b in pairs])
    common = float(np.median(ratios))
    apart = 100 * np.abs(ratios / common - 1).mean()
    return f"{len(pairs)} again: {100 * (common - 1):+.1f} % in common, {apart:.1f} % besides"


def errors(
    pool: Pool, source: str, target: str, metric: str, prior: Prior, splits: int
) -> pd.DataFrame:
    """Return errors in percent, one row per split and one column per kind of training."""
    rows = []
    for seed, judged, rest, generator in pool.splits(splits):

        def error(head: Head[Prior], device: str, judged: Rows = judged) -> float:
            logs = np.log(head.predict(pool.at(judged)).median)
            return pool.error(logs, device, metric, judged)

        drawn = generator.permutation(rest)[:SOURCE_LABELS]
        of_source = pool.fit(prior, source, metric, drawn, seed)
        order = generator.permutation(rest)
        row = {
            f"{source}, {SOURCE_LABELS} labels": error(of_source, source),
            f"{target}, 0, after the source": error(of_source, target),
        }
        for n in TARGET_LABELS:
            for name, start in (("from scratch", None), ("after the source", of_source)):
                head = pool.fit(prior, target, metric, order[:n], seed, start)
                row[f"{target}, {n}, {name}"] = error(head, target)
        rows.append(row)
    return pd.DataFrame(rows)


def coverage_beyond(pool: Pool, devices: Sequence[str], metric: str, splits: int) -> pd.DataFrame:
    """Return, per prediction, its multiple of the largest label and whether intervals held."""
    prior = starting_prior(metric, CPU, kernels=True)
    parts = []
    for device, seed, share in itertools.product(devices, range(splits), LEAST_SHARES):
        values, generator = pool.values(device, metric), np.random.default_rng(seed)
        is_small = values <= np.quantile(values, share)
        distinct = np.unique(pool.groups[is_small])
        names = generator.permutation(distinct)[: max(3, 2 * len(distinct) // 3)]
        is_known = np.isin(pool.groups, names)
        own = generator.permutation(np.flatnonzero(is_small & is_known))[:SOURCE_LABELS]
        if len(own) < SOURCE_LABELS // 4:
            continue
        head = pool.fit(prior, device, metric, own, seed)
        judged = np.flatnonzero(~is_known)
        measured = values[judged]
        estimates = [h.predict(pool.at(judged)) for h in (head, replace(head, labelled=None))]
        widened, plain = ((e.low <= measured) & (measured <= e.high) for e in estimates)
        times = estimates[0].median / values[own].max()
        parts.append(pd.DataFrame({"times": times, "widened": widened, "not widened": plain}))
    return pd.concat(parts)


def print_beyond(pool: Pool, devices: Sequence[str], splits: int) -> None:
    """Print the coverage of intervals by distance, for each metric."""
    for metric in METRICS:
        print(f"\n{metric}: coverage (%) of predictions by their multiple of the largest label")
        rows = coverage_beyond(pool, devices, metric, splits)
        groups = rows.groupby(pd.cut(rows.pop("times"), BEYOND, right=False), observed=False)
        print((100 * groups.mean()).round(0).assign(predictions=groups.size()).to_string())


def _cell(off: Sequence[float] | pd.Series) -> str:
    return f"{np.median(off):5.1f} ({np.mean(off):.1f})"


def main(
    splits: Annotated[int, typer.Option(help="Number of splits.")] = 20,
    source: Annotated[str, typer.Option(help="Host and device.")] = "intel-xeon/cpu-2t",
    target: Annotated[str, typer.Option(help="Host and device.")] = "intel-xeon/cpu-1t",
    beyond: Annotated[
        bool, typer.Option("--beyond", help="Print the coverage far beyond the labels.")
    ] = False,
) -> None:
    """Print a table for each metric."""
    pool = load((source, target))
    if beyond:
        print_beyond(pool, (source, target), splits)
        return
    for metric in METRICS:
        print(f"\n{metric}, {len(pool.configurations)} configurations on each device")
        for device in (source, target):
            print(f"  {device}, {repeats(pool, device, metric)}")
        today, general = (
            errors(pool, source, target, metric, prior, splits)
            for prior in (starting_prior(metric, CPU, kernels=True), GENERAL[metric])
        )
        for name in today:
            cells = _cell(today[name]), _cell(general[name])
            print(f"  {name:42} {cells[0]}   not for CPUs: {cells[1]}")
