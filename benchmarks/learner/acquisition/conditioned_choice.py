"""Whether a covariance of the fitted learner chooses better than that without labels.

    PYTHONPATH=. python benchmarks/learner/acquisition/conditioned_choice.py ../shared/data
        --traces FOLDER --labels infer-3090|infer-4090|train-nhwc|v100 [--seeds 10]
        [--first-seed 3000]

Whole campaigns as `trappm campaign replay` runs them, with the quick learner, on sheets of which
kernels alone are known: 250 rows of timm's inference on the RTX 3090 or 4090 or of its training
in channels-last, and all published steps of V100s. Embeddings are the shares of a step by kind of
kernel. All other sheets are for `trappm campaign replay --strategy random,ours,ours-conditioned`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from benchmarks.learner.acquisition.choosing_for_target import Labels, of_nodes, of_timm
from trappm.experiments.replays import Job, Plan, Results
from trappm.learner.bench.benchmark import Samples
from trappm.learner.bench.replay import Bench, replay
from trappm.learner.physics.step_time_prior import StepTimePrior
from trappm.profiler.records import Configuration
from trappm.terminal.replay_tables import print_summary, summary

OF_TIMM, OF_NODES = (20, 30, 50, 75, 100), (6, 8, 12, 16, 24, 32)
BUDGETS = {
    "infer-3090": OF_TIMM,
    "infer-4090": OF_TIMM,
    "train-nhwc": OF_TIMM,
    "v100": OF_NODES,
}
"""By labels: small sheets end early."""
STRATEGIES = ("random", "ours", "ours-conditioned")


def bench_of(labels: Labels) -> Bench:
    """Labels as campaigns see them."""
    n = len(labels.workloads)
    prior = StepTimePrior(labels.spec)
    return Bench(
        samples=Samples(
            # Rows of one architecture are held out together, so nothing asks for the image size.
            configurations=[
                Configuration(architecture=name, batch_size=w.batch_size, input_size=224)
                for name, w in zip(labels.architectures.tolist(), labels.workloads, strict=True)
            ],
            workloads=labels.workloads,
            values=labels.step_time_ms,
            above=np.full(n, np.nan),
            judged=np.ones(n, dtype=bool),
            spiked=np.zeros(n, dtype=bool),
        ),
        embeddings=prior.features(labels.workloads).astype(np.float32),
        prior=prior,
        times=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="the folder with the labels")
    parser.add_argument("--traces", type=Path, required=True, help="where kernels are kept")
    parser.add_argument("--labels", choices=BUDGETS, default="infer-3090")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=3000)
    arguments = parser.parse_args()
    of = of_nodes if arguments.labels == "v100" else of_timm
    bench = bench_of(of(arguments.labels, arguments.data, arguments.traces))
    plan = Plan(
        labels=arguments.data,
        metric="step_time_ms",
        strategies=STRATEGIES,
        seeds=range(arguments.first_seed, arguments.first_seed + arguments.seeds),
        budgets=BUDGETS[arguments.labels],
    )
    results = Results(Path("unkept"), "")
    for seed in plan.seeds:
        for strategy in plan.strategies:
            points = list(replay(bench, strategy, seed, plan.budgets))
            results.points[Job(seed, plan.learners[0], strategy)] = points
    print_summary(summary(results, plan), plan.metric, "random")


if __name__ == "__main__":
    main()
