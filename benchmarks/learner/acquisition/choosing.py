"""How long each strategy takes to choose a batch from a large pool, and the memory it needs.

    PYTHONPATH=. python benchmarks/learner/acquisition/choosing.py [--pool N] [--batch N]
        [--strategy A,B,...]

The pool is made up: 50 families of configurations, embeddings of 32 numbers, a label on every
thousandth, and a covariance of 320 features, as many as a campaign keeps. One line each.
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np

from trappm.learner.acquisition import STRATEGIES, AcquisitionRequest, Covariance
from trappm.learner.acquisition.covariance import WIDTH
from trappm.learner.bench.strategies import named_strategy

FAMILIES = 50


def made_up(n: int, count: int) -> AcquisitionRequest:
    generator = np.random.default_rng(0)
    family = generator.integers(FAMILIES, size=n)
    middles = generator.normal(0, 3, (FAMILIES, 32))
    scale = (1.0 / np.arange(1, WIDTH + 1)).astype(np.float32)
    features = generator.standard_normal((n, WIDTH), dtype=np.float32) * scale
    return AcquisitionRequest(
        embeddings=(middles[family] + generator.normal(0, 0.5, (n, 32))).astype(np.float32),
        static_features=np.exp(generator.normal(3, 1, (n, 6))),
        labelled=np.arange(0, n, 1000),
        candidates=np.arange(n),
        count=count,
        generator=generator,
        families=[f"family {i}" for i in family],
        covariances=[Covariance(features, 0.1)],
        uncertainty=generator.random(n),
        predicted_cost=generator.random(n) + 0.1,
        failure=generator.random(n),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pool", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--strategy", default=",".join(STRATEGIES))
    arguments = parser.parse_args()
    request = made_up(arguments.pool, arguments.batch)
    for name in arguments.strategy.split(","):
        wall, cpu = time.perf_counter(), time.process_time()
        named_strategy(name).select(request)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"{name:16} {wall:6.1f} s, {cpu:6.1f} CPU s, peak {peak:,.0f} MiB so far", flush=True)


if __name__ == "__main__":
    main()
