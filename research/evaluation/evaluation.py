"""Training and evaluation of predictors on labels, with reports as JSON values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from research.evaluation.benchmark import (
    PAPER_SEEDS,
    BenchmarkPlan,
    Samples,
    SourceDevice,
    SplitKind,
    run_plan,
    score,
    summarize,
)
from research.evaluation.label_files import read_labels
from research.evaluation.workbench import Prepared, Workbench
from research.peers.predictors import ESTIMATORS
from trappm.learner.interface import Estimate, Estimator, Model
from trappm.profiler.errors import InputError
from trappm.profiler.records import Measurement
from trappm.profiler.records.step_scope import IN_TRAINING
from trappm.store import Home, LabelFilter, Store

WITHOUT_WEIGHTS = frozenset({"mlp", "xgboost", "faketensor"})
"""Estimators that cannot start from another device's model."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Settings of both kinds of evaluation."""

    bench: Workbench
    estimators: Sequence[str] | None = None
    """Names (default: all that the labels support, in sizes for a laptop core)."""
    size: str = "laptop"
    seeds: Sequence[int] = PAPER_SEEDS
    label_counts: Sequence[int] = ()
    start: Path | None = None
    """Labels of another device to train starting points on."""


def evaluate_splits(
    request: Request,
    splits: Sequence[SplitKind],
    *,
    labels: Path | None,
    device: str | None,
) -> dict[str, Any]:
    """Train and evaluate on splits of the labels of a file, or of a device in the label store.

    Raises:
        InputError: The labels cannot be read or split, or an estimator lacks an input.
        StoreError: The label store cannot be used.
    """
    bench = request.bench
    prepared = bench.prepared(_labels(bench.home, labels, device))
    samples, estimators = prepared.samples, _estimators(request, prepared)
    plan = BenchmarkPlan(
        splits=splits,
        seeds=request.seeds,
        label_counts=request.label_counts,
        source=_source(request, prepared, estimators),
    )
    return {
        "metric": bench.metric,
        "device": prepared.device,
        "labels": _counts(prepared),
        "seeds": list(request.seeds),
        "results": summarize(samples, list(run_plan(samples, estimators, plan, bench.watch))),
    }


def evaluate_files(request: Request, train: Path, test: Path) -> dict[str, Any]:
    """Train on the labels of one file and evaluate on those of another.

    Raises:
        InputError: A file cannot be read, or they are of different devices.
        StoreError: The label store, which contains the graphs, cannot be used.
    """
    bench = request.bench
    learned = bench.prepared(read_labels(train, named_like=test))
    tested = bench.prepared(read_labels(test, named_like=train))
    if learned.device != tested.device:
        raise InputError(
            f"{train.name} has labels of {learned.device}, {test.name} of {tested.device}; "
            "use --start for labels of another device"
        )
    estimates = {**learned.estimates_mib, **tested.estimates_mib}
    estimators = _estimators(request, replace(learned, estimates_mib=estimates))
    source = _source(request, learned, estimators)
    results = []
    for done, estimator in enumerate(estimators):
        bench.watch(done, len(estimators), estimator.name)
        start = None
        if source is not None and estimator.name in source.estimators:
            start = _fit(source.estimators[estimator.name], source.samples, request)
        estimate = _fit(estimator, learned.samples, request, start).predict(
            tested.samples.workloads
        )
        results.append(
            {
                "estimator": estimator.name,
                "transferred": start is not None,
                **score(tested.samples, np.arange(len(tested.samples)), estimate),
                "predictions": _predictions(tested.samples, estimate),
            }
        )
    seen = set(learned.samples.architectures) & set(tested.samples.architectures)
    return {
        "metric": bench.metric,
        "device": learned.device,
        "train": {"file": train.name, **_counts(learned)},
        "test": {"file": test.name, **_counts(tested), "architectures_in_training": len(seen)},
        "seed": request.seeds[0],
        "results": results,
    }


def _labels(home: Home, labels: Path | None, device: str | None) -> list[Measurement]:
    if labels is not None:
        return read_labels(labels)
    with Store.open(home.database_url) as store:
        measurements = [
            measurement
            for measurement in store.measurements.each(LabelFilter(device=device))
            if measurement.protocol.name != IN_TRAINING
        ]
    if not measurements:
        raise InputError(
            f"the label store has no labels of {device}; see: trappm labels query"
            if device
            else "the label store is empty; give a file with --labels, or import one"
        )
    return measurements


def _estimators(request: Request, prepared: Prepared) -> list[Estimator]:
    names, bench = request.estimators, request.bench
    if names is None:
        estimated = bench.metric == "memory_mib" and prepared.estimates_mib.keys() >= {
            *prepared.samples.workloads
        }
        names = [n for n in ESTIMATORS if "paper" not in n and (estimated or n != "faketensor")]
    return [bench.estimator(name, prepared, request.size) for name in names]


def _source(
    request: Request, target: Prepared, estimators: Sequence[Estimator]
) -> SourceDevice | None:
    """Return the other device with the estimators that can start from its models."""
    if request.start is None:
        return None
    bench = request.bench
    source = bench.prepared(read_labels(request.start))
    # The encoder is the target's, since networks start from weights over its embeddings.
    of_source = replace(target, card=source.card)
    names = [e.name for e in estimators if e.name not in WITHOUT_WEIGHTS]
    return SourceDevice(
        source.samples, {name: bench.estimator(name, of_source, request.size) for name in names}
    )


def _fit(
    estimator: Estimator, samples: Samples, request: Request, start: Model | None = None
) -> Model:
    """Return a model trained on all samples."""
    rows = np.arange(len(samples))
    generator = np.random.default_rng(request.seeds[0])
    return estimator.fit(samples.workloads, samples.targets(rows), generator, start)


def _counts(prepared: Prepared) -> dict[str, Any]:
    samples = prepared.samples
    return {
        "count": len(samples),
        "bounds_only": int(np.isnan(samples.values).sum()),
        "judged": int(samples.judged.sum()),
        "architectures": len(set(samples.architectures)),
        "left_out": dict(prepared.left_out),
    }


def _predictions(samples: Samples, estimate: Estimate) -> list[dict[str, Any]]:
    table = pd.DataFrame(
        {
            "architecture": samples.architectures,
            "batch_size": [what.batch_size for what in samples.configurations],
            "input_size": [what.input_size for what in samples.configurations],
            "measured": samples.values,
            "above": samples.above,
            "predicted": estimate.median,
        }
    )
    if estimate.low is not None and estimate.high is not None:
        table = table.assign(low=estimate.low, high=estimate.high)
    rows: list[dict[str, Any]] = json.loads(table.to_json(orient="records", double_precision=15))
    return rows
