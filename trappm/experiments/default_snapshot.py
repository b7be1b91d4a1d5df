"""Trains the snapshot that ships with the package, on labels that others published.

    python -m trappm.experiments.default_snapshot ../shared/data        (or: make default-snapshot)

So a prediction needs no campaign: memory of training on an A100 (GPUMemNet), training steps on an
RTX 3090 and inference steps on an RTX 3090 and 4090 (timm's own results). Heads are judged on
architectures held out, then trained on all labels. Profiles that are missing are made once and
kept in TRAPPM_HOME, as `trappm evaluate` does; the labels themselves are never kept. The same
labels, versions and seed give the same heads.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trappm.cluster.profiles.step_profiles import StepCache
from trappm.cluster.workers.interfaces import TrainingLabel
from trappm.experiments.label_files import read_labels, read_usable
from trappm.experiments.labelled_workloads import step_keys
from trappm.experiments.workbench import opened_workbench
from trappm.learner.bench.benchmark import Samples
from trappm.learner.bench.scores import Score, score
from trappm.learner.heads.device_heads import Heads
from trappm.learner.heads.metric_head import Head, Ours
from trappm.learner.heads.predictions import StepSettings, TrainedHeads
from trappm.learner.networks.presets import LAPTOP
from trappm.learner.physics.device_specs import spec_of
from trappm.learner.physics.memory_prior import MemoryPrior
from trappm.learner.physics.prior import Prior
from trappm.learner.physics.step_time_prior import StepTimePrior
from trappm.learner.snapshots.manifest import MANIFEST
from trappm.learner.snapshots.snapshot import SnapshotInfo, save_snapshot
from trappm.learner.workload import Workload
from trappm.prediction.snapshot_choice import SHIPPED
from trappm.profiler.records import METRICS, Graph, Measurement, Phase
from trappm.profiler.records.step_scope import StepScope
from trappm.store import Home

SEED = 1337
HELD_OUT = 0.2
SPLIT = "a fifth of the architectures held out, seed 1337; then trained on all labels"


@dataclass(frozen=True)
class Sheet:
    """One published file, and what is learned from it."""

    file: str
    device: str
    phase: Phase
    metric: str
    usable: str | None = None
    """A file of the rows that judge."""


SHEETS = (
    Sheet(
        "a100_40gb_train_memory.csv",
        "a100-40gb",
        Phase.TRAIN,
        "memory_mib",
        usable="a100_40gb_train_memory_quality.csv",
    ),
    Sheet("rtx3090_train_step_amp_nchw.csv", "rtx3090", Phase.TRAIN, "step_time_ms"),
    Sheet("rtx3090_infer_step_amp_nchw.csv", "rtx3090", Phase.INFER, "step_time_ms"),
    Sheet("rtx4090_infer_step_amp_nchw.csv", "rtx4090", Phase.INFER, "step_time_ms"),
)


@dataclass(frozen=True, eq=False)
class Trained:
    """The head of one sheet."""

    sheet: Sheet
    head: Head[Prior]
    errors: Score
    """On the architectures held out, of a head that has not seen them."""
    measurements: Sequence[Measurement]
    """All that it was trained on."""


def train(sheet: Sheet, data: Path, processes: int) -> Trained:
    """Judges and trains the head of one sheet in the folder `data`.

    Raises:
        InputError: the file is missing or cannot be read.
    """
    measurements = read_labels(data / sheet.file)
    usable = read_usable(data / sheet.usable) if sheet.usable else None
    prior: Prior
    with opened_workbench(sheet.metric, processes=processes, usable=usable, watch=_show) as bench:
        if sheet.metric == "memory_mib":
            # Its constants start from this very sheet, not from those of today's software.
            samples, prior = bench.prepared(measurements).samples, MemoryPrior()
        else:
            samples = _timed(measurements, StepCache(bench.home.step_profiles), processes)
            prior = StepTimePrior(spec_of(sheet.device))
    test = _held_out(samples)
    _show(0, 2, f"judging {sheet.file}")
    judged = _fit(prior, samples, np.flatnonzero(~test))
    rows = np.flatnonzero(test)
    errors = score(samples, rows, judged.predict(samples.at(rows)))
    _show(1, 2, f"training {sheet.file}: held-out errors {errors['accuracy']}")
    return Trained(sheet, _fit(prior, samples, np.arange(len(samples))), errors, measurements)


def publish(trained: Sequence[Trained], registry: Path) -> SnapshotInfo:
    """Publishes all heads as one snapshot."""
    heads: dict[str, dict[Phase, TrainedHeads]] = {}
    errors: dict[str, Any] = {}
    labels: list[TrainingLabel] = []
    for part in trained:
        sheet = part.sheet
        simulated = sheet.metric == "memory_mib"
        head = {sheet.metric: part.head}
        settings = Counter(
            StepSettings(c.precision, c.memory_format, c.optimizer)
            for c in (m.configuration for m in part.measurements)
        )
        heads.setdefault(sheet.device, {})[sheet.phase] = TrainedHeads(
            Heads(head if simulated else {}, {} if simulated else head, len(part.measurements)),
            tuple(setting for setting, _ in settings.most_common()),
        )
        of_device = errors.setdefault(sheet.device, {})
        of_device.setdefault(sheet.phase.value, {})[sheet.metric] = {
            **(part.errors["accuracy"] or {}),
            "by_family": {
                family: {"count": of_family["count"], "mape": of_family["mape"]}
                for family, of_family in part.errors["by_family"].items()
                if of_family is not None
            },
        }
        labels += [_label(m, sheet) for m in part.measurements]
    return save_snapshot(
        registry,
        heads=heads,
        source_device=SHEETS[0].device,
        preset=LAPTOP,
        labels=labels,
        fields={
            "campaign": None,
            "errors": errors,
            "split": SPLIT,
            "label_counts": {"imported": len(labels)},
            "sources": [_source(part) for part in trained],
        },
    )


def _source(part: Trained) -> dict[str, Any]:
    """The manifest's entry for a sheet."""
    rare = {"without_spikes", "out_of_memory"}
    return {
        "file": part.sheet.file,
        "source": part.measurements[0].environment["source"],
        "device": part.sheet.device,
        "phase": part.sheet.phase.value,
        "metric": part.sheet.metric,
        "labels": len(part.measurements),
        **{name: errors for name, errors in part.errors.items() if name in rare},
    }


def _timed(measurements: Sequence[Measurement], cache: StepCache, processes: int) -> Samples:
    """Step times with their kernels, which are all that the prior of time needs."""
    keys = step_keys(measurements, cache, processes, _show, stored={})
    rows = []
    for measurement in measurements:
        step = cache.get(keys[measurement.attempt_key])
        if step is not None and measurement.step_time_ms is not None:
            what = measurement.configuration
            workload = Workload(
                graph=Graph.empty(what.batch_size),
                precision=what.precision,
                memory_format=what.memory_format,
                optimizer=what.optimizer,
                phase=what.phase,
                scope=StepScope.of(measurement.environment),
                kernels=step.kernels,
            )
            rows.append((what, workload, measurement.step_time_ms))
    values = np.array([value for _, _, value in rows])
    return Samples(
        configurations=[what for what, _, _ in rows],
        workloads=[workload for _, workload, _ in rows],
        values=values,
        above=np.full(len(rows), np.nan),
        judged=np.ones(len(rows), dtype=bool),
        spiked=np.zeros(len(rows), dtype=bool),
    )


def _held_out(samples: Samples) -> np.ndarray[Any, np.dtype[np.bool_]]:
    names = np.array(samples.architectures)
    chosen = np.zeros(len(names), dtype=np.bool_)
    for name in np.random.default_rng(SEED).permutation(np.unique(names)):
        if chosen.mean() >= HELD_OUT:
            break
        chosen |= names == name
    return chosen


def _fit(prior: Prior, samples: Samples, rows: np.ndarray[Any, np.dtype[np.int64]]) -> Head[Prior]:
    return Ours(prior).fit(samples.at(rows), samples.targets(rows), np.random.default_rng(SEED))


def _label(measurement: Measurement, sheet: Sheet) -> TrainingLabel:
    value = getattr(measurement, sheet.metric)
    return TrainingLabel(
        configuration_id=measurement.configuration.id,
        device=sheet.device,
        values=tuple(value if metric == sheet.metric else None for metric in METRICS),
        role="train",
        provenance="imported",
        memory_above_mib=measurement.memory_detail_mib.get("capacity"),
    )


def _show(done: int, total: int, what: str) -> None:
    sys.stderr.write(f"{done}/{total} {what}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="the folder with the published labels")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--to", type=Path, default=SHIPPED, help="the folder to write, made anew")
    arguments = parser.parse_args()
    trained = [train(sheet, arguments.data, arguments.processes) for sheet in SHEETS]
    info = publish(trained, Home.open().path / "shipping")
    shutil.rmtree(arguments.to, ignore_errors=True)
    shutil.copytree(info.folder, arguments.to)
    total = sum(path.stat().st_size for path in arguments.to.iterdir())
    sys.stdout.write(f"snapshot {info.id}: {arguments.to / MANIFEST}, {total:,} bytes in all\n")


if __name__ == "__main__":
    main()
