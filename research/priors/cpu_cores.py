"""How far heads of CPU cores are off, on the whole pool of the preset `laptop`
(docs/studies/cpu_cores.md).

    PYTHONPATH=. python research/priors/cpu_cores.py [--splits 20] [--beyond | --parts]
        [--source intel-xeon/cpu-2t] [--target intel-xeon/cpu-1t]

Every configuration of the pool was measured on two threads and on one of two hosts, and some once
more later (`examples/data/cpu`). Each split holds a fifth of the architectures out. As a campaign
does, it draws 40 labels of the source and few of the target from the rest; all of the held out are
judged: the median and, in brackets, the mean over splits of the mean absolute percentage error.
With `--beyond` heads learn from the least labels of two thirds of the architectures, and what
intervals of the others cover is told by how far beyond these labels the answer lies: widened for
that distance as heads do it, and as they would be without. With `--parts` the formula of step times
is judged alone: without some of its terms, and starting from more or less of a source's constants.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from research.snapshot.shipped_sheets import our_labels
from trappm.learner.estimator import Targets
from trappm.learner.heads.metric_head import Head, Ours
from trappm.learner.physics import cpu_priors
from trappm.learner.physics.cpu_priors import CpuTimePrior
from trappm.learner.physics.device_specs import CPU
from trappm.learner.physics.graph_prior import GraphPrior
from trappm.learner.physics.memory_prior import MemoryPrior
from trappm.learner.physics.prior import Prior
from trappm.learner.physics.starting_prior import starting_prior
from trappm.learner.stats.folds import content_groups
from trappm.learner.workload import Workload
from trappm.profiler.records import Configuration, Measurement, Outcome
from trappm.profiler.static_profile import static_profile
from trappm.store.files import read_file

Array = npt.NDArray[np.float64]

DEVICES = (
    "intel-xeon/cpu-2t",
    "intel-xeon/cpu-1t",
    "amd-epyc/cpu-2t",
    "amd-epyc/cpu-1t",
)
METRICS = ("step_time_ms", "memory_mib")
SOURCE_LABELS, TARGET_LABELS = 40, (6, 10, 18, 40, 150)
HELD_OUT = 0.2
LEAST_SHARES = (0.06, 0.1, 0.15, 0.25, 0.35, 0.5, 0.75)
"""Of all labels, from the least: what heads that are judged beyond them learn from."""
BEYOND = (0.0, 1.0, 2.0, 3.0, 5.0, 10.0, 15.0, np.inf)
"""Times the largest label: between neighbouring ones what is covered is told."""
BEFORE: Mapping[str, Prior] = {
    "step_time_ms": GraphPrior("step_time_ms"),
    "memory_mib": MemoryPrior.on(CPU),
}
"""Formulas that know nothing of CPUs in particular."""


@dataclass(frozen=True, eq=False)
class Pool:
    """Configurations, their workloads, and by device what was first and what was measured again."""

    configurations: Sequence[Configuration]
    workloads: Sequence[Workload]
    first: Mapping[str, Mapping[Configuration, Measurement]]
    again: Mapping[str, Mapping[Configuration, Measurement]]

    @cached_property
    def twins(self) -> list[str]:
        """With whom each configuration is held out (n): names of the same layers are one."""
        return content_groups([c.architecture for c in self.configurations], self.workloads)

    def values(self, device: str, metric: str) -> Array:
        """(n), in the metric's unit."""
        return np.array([_value(self.first[device][c], metric) for c in self.configurations])


def load(devices: Sequence[str]) -> Pool:
    """The configurations that all these devices have labels of, with every model traced."""
    first: dict[str, dict[Configuration, Measurement]] = {}
    again: dict[str, dict[Configuration, Measurement]] = {}
    for device in devices:
        first[device], again[device] = _passes(our_labels(f"cpu/{device}.jsonl.xz", _attempts))
    configurations = sorted(
        set.intersection(*(set(of_device) for of_device in first.values())),
        key=lambda c: (c.architecture, c.input_size, c.batch_size),
    )
    profiles = {}
    for c in configurations:
        if (c.architecture, c.input_size) not in profiles:
            profiles[c.architecture, c.input_size] = static_profile(c.architecture, c.input_size)
    workloads = []
    for c in configurations:
        profile = profiles[c.architecture, c.input_size]
        step = profile.step
        kernels = step.kernels_in(c.precision, c.memory_format)
        workloads.append(Workload(graph=profile.graph.at(c.batch_size), step=step, kernels=kernels))
    return Pool(configurations, workloads, first, again)


def _attempts(path: Path) -> list[Measurement]:
    return [v.measurement for v in read_file(path) if v.measurement is not None]


def _passes(
    measurements: Sequence[Measurement],
) -> tuple[dict[Configuration, Measurement], dict[Configuration, Measurement]]:
    """A measurement of each configuration, stable if there is one, and the next stable one."""
    first: dict[Configuration, Measurement] = {}
    again: dict[Configuration, Measurement] = {}
    for m in measurements:
        if m.outcome is Outcome.OK:
            if m.configuration in first:
                again.setdefault(m.configuration, m)
            else:
                first[m.configuration] = m
    for m in measurements:
        if m.outcome is Outcome.UNSTABLE and m.step is not None:
            first.setdefault(m.configuration, m)
    return first, again


def _value(measurement: Measurement, metric: str) -> float:
    if metric == "memory_mib":
        assert measurement.memory_mib is not None
        return measurement.memory_mib
    assert measurement.step is not None
    return measurement.step.median_ms


def repeats(pool: Pool, device: str, metric: str) -> str:
    """How far a second measurement is from the first, and how far beside their common factor."""
    pairs = [(pool.first[device][c], m) for c, m in pool.again[device].items()]
    ratios = np.array([_value(b, metric) / _value(a, metric) for a, b in pairs])
    common = float(np.median(ratios))
    apart = 100 * np.abs(ratios / common - 1).mean()
    return f"{len(pairs)} again: {100 * (common - 1):+.1f} % in common, {apart:.1f} % beside it"


def errors(
    pool: Pool, pair: tuple[str, str], metric: str, prior: Prior, splits: int
) -> dict[str, list[float]]:
    """Errors in percent over splits, by what was learned from."""
    off_by: dict[str, list[float]] = {}
    for seed in range(splits):
        for name, off in _errors_of_split(pool, pair, metric, prior, seed).items():
            off_by.setdefault(name, []).append(off)
    return off_by


def _errors_of_split(
    pool: Pool, pair: tuple[str, str], metric: str, prior: Prior, seed: int
) -> dict[str, float]:
    of_source, of_target = pair
    names = np.array(pool.twins)
    values = {device: pool.values(device, metric) for device in pair}
    generator = np.random.default_rng(seed)
    distinct = np.unique(names)
    held_out = generator.permutation(distinct)[: round(HELD_OUT * len(distinct))]
    judged = np.flatnonzero(np.isin(names, held_out))
    rest = np.flatnonzero(~np.isin(names, held_out))
    to_judge = [pool.workloads[i] for i in judged.tolist()]

    def fit(rows: npt.NDArray[np.int64], device: str, start: Head[Prior] | None) -> Head[Prior]:
        targets = Targets(values[device][rows], np.full(len(rows), np.nan), names[rows].tolist())
        own = [pool.workloads[i] for i in rows.tolist()]
        return Ours(prior).fit(own, targets, np.random.default_rng(seed), start)

    def off(head: Head[Prior], device: str) -> float:
        median = head.predict(to_judge).median
        return float(100 * np.abs(median / values[device][judged] - 1).mean())

    source = fit(generator.permutation(rest)[:SOURCE_LABELS], of_source, None)
    order = generator.permutation(rest)
    result = {
        f"{of_source}, {SOURCE_LABELS} labels": off(source, of_source),
        f"{of_target}, 0, after the source": off(source, of_target),
    }
    for n in TARGET_LABELS:
        own, moved = fit(order[:n], of_target, None), fit(order[:n], of_target, source)
        result[f"{of_target}, {n}, from scratch"] = off(own, of_target)
        result[f"{of_target}, {n}, after the source"] = off(moved, of_target)
    return result


def coverage_beyond(pool: Pool, devices: Sequence[str], metric: str, splits: int) -> Array:
    """Times the largest label of each answer, whether its interval held, and would have (n, 3)."""
    prior = starting_prior(metric, CPU, kernels=True)
    names = np.array(pool.twins)
    rows = []
    for device, seed, share in itertools.product(devices, range(splits), LEAST_SHARES):
        values, generator = pool.values(device, metric), np.random.default_rng(seed)
        is_small = values <= np.quantile(values, share)
        distinct = np.unique(names[is_small])
        kept = generator.permutation(distinct)[: max(3, 2 * len(distinct) // 3)]
        own = generator.permutation(np.flatnonzero(is_small & np.isin(names, kept)))[:SOURCE_LABELS]
        if len(own) < SOURCE_LABELS // 4:
            continue
        targets = Targets(values[own], np.full(len(own), np.nan), names[own].tolist())
        workloads = [pool.workloads[i] for i in own.tolist()]
        head = Ours(prior).fit(workloads, targets, np.random.default_rng(seed))
        judged = np.flatnonzero(~np.isin(names, kept))
        of_judged, measured = [pool.workloads[i] for i in judged.tolist()], values[judged]
        held = [
            (e.low <= measured) & (measured <= e.high)
            for e in (h.predict(of_judged) for h in (head, replace(head, labelled=None)))
        ]
        times = head.predict(of_judged).median / values[own].max()
        rows.append(np.column_stack([times, *held]))
    return np.vstack(rows)


def print_beyond(pool: Pool, devices: Sequence[str], splits: int) -> None:
    """Prints what intervals cover by distance, for each metric."""
    for metric in METRICS:
        print(f"\n{metric}: answers this many times the largest label, and what intervals cover")
        rows = coverage_beyond(pool, devices, metric, splits)
        for start, end in itertools.pairwise(BEYOND):
            there = rows[(rows[:, 0] >= start) & (rows[:, 0] < end)]
            widened, without = 100 * there[:, 1:].mean(axis=0)
            print(
                f"  {start:4g} to {end:4g}: {len(there):5} answers, {widened:3.0f} %, "
                f"not widened {without:3.0f} %"
            )


PARTS = {
    "calls of convolutions": ("forward convolutions", "backward convolutions"),
    "narrow images": ("narrow forward", "narrow backward"),
    "few rows": ("few rows",),
    "large weights": ("large weights",),
}
"""Terms of `cpu_priors` that came later than the others."""
SHARES = (0.0, 0.25, 0.5, 1.0)


class Without(CpuTimePrior):
    """The formula with some of its terms left out."""

    left_out: ClassVar[tuple[str, ...]] = ()

    def terms(self, workloads: Sequence[Workload]) -> Array:
        terms = super().terms(workloads).copy()
        terms[:, [term.name in self.left_out for term in self.SPEC.terms]] = 0.0
        return terms


def prior_errors(
    pool: Pool, start: Prior, device: str, count: int, splits: int, source: str | None = None
) -> list[float]:
    """Of the formula alone after so many labels of a device, and `SOURCE_LABELS` of a source."""
    names = np.array(pool.twins)
    off = []
    for seed in range(splits):
        generator = np.random.default_rng(seed)
        distinct = np.unique(names)
        held_out = np.isin(
            names, generator.permutation(distinct)[: round(HELD_OUT * len(distinct))]
        )
        rest = np.flatnonzero(~held_out)

        def fitted(
            prior: Prior, key: str, chosen: npt.NDArray[np.int64], tightness: float = 1.0
        ) -> Prior:
            logs = np.log(pool.values(key, "step_time_ms")[chosen])
            own = [pool.workloads[i] for i in chosen.tolist()]
            return prior.refit(own, logs, tightness=tightness)

        begun = start
        if source is not None:
            begun = start.started_from(
                fitted(start, source, generator.permutation(rest)[:SOURCE_LABELS])
            )
        prior = fitted(begun, device, generator.permutation(rest)[:count])
        judged = [pool.workloads[i] for i in np.flatnonzero(held_out).tolist()]
        ratios = np.exp(prior.log_values(judged)) / pool.values(device, "step_time_ms")[held_out]
        off.append(float(100 * np.abs(ratios - 1).mean()))
    return off


def print_parts(pool: Pool, pair: tuple[str, str], splits: int) -> None:
    """Prints what terms are worth, then what of a source's constants is."""
    print(f"step_time_ms, {SOURCE_LABELS} labels, without")
    for name, terms in {"nothing": (), **PARTS, "all": sum(PARTS.values(), ())}.items():
        Without.left_out = terms
        cells = (_cell(prior_errors(pool, Without(), key, SOURCE_LABELS, splits)) for key in pair)
        print(f"  {name:24} {'   '.join(cells)}", flush=True)
    source, target = pair
    print(f"{target} after {source}, with so much of what sets its constants apart")
    for share in SHARES:
        cpu_priors.SHARED = share
        cells = (
            f"{n}: {_cell(prior_errors(pool, CpuTimePrior(), target, n, splits, source))}"
            for n in TARGET_LABELS[:-1]
        )
        print(f"  {share:4} {'   '.join(cells)}", flush=True)


def main() -> None:
    """Prints a table for each metric."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--source", choices=DEVICES, default=DEVICES[0])
    parser.add_argument("--target", choices=DEVICES, default=DEVICES[1])
    parser.add_argument("--beyond", action="store_true", help="tell what intervals cover far off")
    parser.add_argument("--parts", action="store_true", help="tell what terms and starts are worth")
    options = parser.parse_args()
    pair, splits = (options.source, options.target), options.splits
    pool = load(pair)
    if options.parts:
        print_parts(pool, pair, splits)
        return
    if options.beyond:
        print_beyond(pool, pair, splits)
        return
    for metric in METRICS:
        print(f"\n{metric}, {len(pool.configurations)} configurations on each device")
        for device in pair:
            print(f"  {device}, {repeats(pool, device, metric)}")
        today = errors(pool, pair, metric, starting_prior(metric, CPU, kernels=True), splits)
        before = errors(pool, pair, metric, BEFORE[metric], splits)
        for name, off in today.items():
            print(f"  {name:42} {_cell(off)}   not for CPUs: {_cell(before[name])}", flush=True)


def _cell(off: Sequence[float]) -> str:
    return f"{np.median(off):5.1f} ({np.mean(off):.1f})"


if __name__ == "__main__":
    main()
