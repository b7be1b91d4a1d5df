"""What learners make of a few made-up labels, for recordings."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from feature_zoo import Convolutions, OtherOperators, in_all_settings
from kernel_samples import networks as kernel_networks
from network_zoo import SMALL, costs, network
from pool_samples import request

from trappm.learner.acquisition import STRATEGIES, strategy_named
from trappm.learner.heads.physics_heads import starting_prior, train_heads
from trappm.learner.interface import Predictions, Workload
from trappm.learner.paper.encoder import random_encoder
from trappm.profiler.devices.catalogue import spec_of
from trappm.profiler.records import Optimizer, Phase, Precision

TRAINED = 24
"""Labelled workloads of 48; what is predicted of the others is recorded."""
CARDS = ("a100", "v100", "t4", "l40s", "b200", "cpu-2t")
NETWORKS = replace(SMALL.head, physical_prior=False, steps=3)


def learned() -> list[dict[str, Any]]:
    """Return what priors say without labels, what labels make of them, and what is chosen."""
    return [*_without_labels(), *_of_graphs(), *_of_kernels(), *_choices()]


def _numbers(values: Any) -> list[Any]:
    """Return values with six significant digits, and None for those that are not numbers."""
    flat = np.asarray(values, dtype=float).ravel()
    return [None if np.isnan(x) else float(f"{x:.6g}") for x in flat.tolist()]


def _without_labels() -> Iterator[dict[str, Any]]:
    workloads = [
        w for module in (Convolutions(), OtherOperators()) for w in in_all_settings(module)
    ]
    for card in CARDS:
        for metric in ("step_time_ms", "memory_mib", "power_w"):
            prior = starting_prior(metric, spec_of(card), kernels=True)
            logs = prior.log_values(workloads)
            yield {"card": card, "metric": metric, "values": _numbers(np.exp(logs))}


def _all_of(predictions: Predictions) -> dict[str, Any]:
    names = ("median", "low", "high", "log_std", "disagreement", "outside", "extrapolated_from")
    return {name: _numbers(getattr(predictions, name)) for name in names}


def _of_graphs() -> Iterator[dict[str, Any]]:
    """Heads of graphs without kernels: from scratch, with limits, and from another device."""
    graphs, names = [], []
    for kind in ("plain", "residual", "depthwise", "mixer"):
        for width, depth in ((8, 2), (8, 5), (24, 2), (24, 5)):
            for batch_size in (1, 4, 16):
                graphs.append(network(kind, width, depth, batch_size))
                names.append(f"{kind}-{width}-{depth}")
    encoder = random_encoder(graphs, SMALL.encoder, np.random.default_rng(0))
    embeddings = encoder.embed(graphs)
    yield {"embedding": _numbers(embeddings[:2])}
    how = itertools.cycle(itertools.product(Phase, (Precision.FP32, Precision.AMP_BF16), Optimizer))
    workloads = [
        Workload(graph=g, embedding=e, phase=phase, precision=precision, optimizer=optimizer)
        for g, e, (phase, precision, optimizer) in zip(graphs, embeddings, how, strict=False)
    ]
    yield {"static_features": [_numbers(w.static_features) for w in workloads[:24:5]]}
    rows = np.random.default_rng(1).permutation(len(graphs))
    training, others = rows[:TRAINED].tolist(), rows[TRAINED::4].tolist()
    values = costs(graphs, noise_seed=1)
    values[:, 2] = 100 + 10 * np.log(values[:, 0])
    above = np.full_like(values, np.nan)
    above[training[:3], 1], values[training[:3], 1] = values[training[:3], 1], np.nan
    source = None
    for title, preset, speed in (
        ("source", SMALL.head, 1.0), ("target", SMALL.head, 0.5), ("networks", NETWORKS, 1.0),
    ):  # fmt: skip
        heads = train_heads(
            [workloads[i] for i in training], values[training] / [speed, 1, 1],
            groups=[names[i] for i in training], preset=preset, above=above[training],
            generator=np.random.default_rng(2), init=None if title == "networks" else source,
            errors=np.full((TRAINED, 3), 0.05),
        )  # fmt: skip
        source = source or heads
        asked = [workloads[i] for i in others]
        yield {"heads": title} | _all_of(heads.predict(asked))
    yield {"risk": _numbers(source.out_of_memory(asked, 200.0))}


def _of_kernels() -> Iterator[dict[str, Any]]:
    """Heads of kernels, of an A100's data sheet, whose labels are those of another card."""
    workloads = kernel_networks(40, seed=5)
    truth = starting_prior("step_time_ms", spec_of("rtx3090"), kernels=True).log_values(workloads)
    random = np.random.default_rng(6)
    values = np.full((len(workloads), 3), np.nan)
    values[:, 0] = np.exp(truth + 0.05 * random.normal(size=len(truth)))
    values[:, 2] = 150 + 60 * random.random(len(truth))
    heads = train_heads(
        workloads[:TRAINED], values[:TRAINED],
        groups=[str(i // 2) for i in range(TRAINED)], preset=SMALL.head, generator=random,
        spec=spec_of("a100"),
    )  # fmt: skip
    yield {"heads": "kernels"} | _all_of(heads.predict(workloads[TRAINED:]))


def _choices() -> Iterator[dict[str, Any]]:
    for name in STRATEGIES:
        for title, options in (
            ("none", {"labelled": np.zeros(0, dtype=np.int64)}), ("some", {}),
            ("risky", {"failure": np.linspace(0, 1, 60), "predicted_cost": np.linspace(9, 1, 60)}),
        ):  # fmt: skip
            query = request(seed=3, **options)
            picks = strategy_named(name, cost=title == "risky" and name == "ours").select(query)
            yield {"strategy": name, "labels": title, "picks": [pick.index for pick in picks]}
