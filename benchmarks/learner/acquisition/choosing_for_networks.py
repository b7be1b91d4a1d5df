"""What purely learned heads learn from few labels, by how these are chosen.

    PYTHONPATH=. python benchmarks/learner/acquisition/choosing_for_networks.py SHEET --results FILE
        [--learner trappm-laptop|trappm-paper|nnlqp] [--strategy random,ours,ours-laplace]
        [--budgets 20 50 100] [--seeds 4] [--first-seed 3000]

Campaigns are those of `trappm campaign replay`, with fewer rounds, since a training takes most of
a minute. Trainings on equal labels are made once for all
strategies. Campaigns are kept as they end; the same command goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from trappm.experiments.replays import Benches, Job, Plan, Results
from trappm.learner.bench.replay import Bench, replay
from trappm.learner.estimator import Estimator, Model, Targets
from trappm.learner.workload import Workload
from trappm.terminal.replay_tables import print_summary, summary


class Once:
    """An estimator that trains once on the same labels with the same draws."""

    def __init__(self, estimator: Estimator) -> None:
        self._estimator = estimator
        self._models: dict[tuple[object, ...], Model] = {}
        self.name = estimator.name

    def fit(
        self,
        workloads: Sequence[Workload],
        targets: Targets,
        generator: np.random.Generator,
        start: Model | None = None,
    ) -> Model:
        key = (*map(id, workloads), str(generator.bit_generator.state))
        if key not in self._models:
            self._models[key] = self._estimator.fit(workloads, targets, generator, start)
        return self._models[key]


def bench_of(plan: Plan, learner: str) -> Bench:
    bench = Benches(plan).bench(learner)
    assert bench.estimator is not None
    return replace(bench, estimator=Once(bench.estimator))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("labels", type=Path, help="a sheet of step times")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--learner", default="trappm-laptop")
    parser.add_argument("--strategy", default="random,ours,ours-laplace")
    parser.add_argument("--budgets", type=int, nargs="+", default=[20, 50, 100])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--first-seed", type=int, default=3000)
    arguments = parser.parse_args()
    plan = Plan(
        labels=arguments.labels,
        metric="step_time_ms",
        strategies=arguments.strategy.split(","),
        learners=[arguments.learner],
        seeds=range(arguments.first_seed, arguments.first_seed + arguments.seeds),
        budgets=arguments.budgets,
    )
    results, bench = Results.read(arguments.results, plan.identity), None
    for seed in plan.seeds:
        for strategy in plan.strategies:
            job = Job(seed, arguments.learner, strategy)
            if job not in results.points:
                bench = bench or bench_of(plan, arguments.learner)
                results.add(job, list(replay(bench, strategy, seed, plan.budgets)))
    print_summary(summary(results, plan), plan.metric, "random")


if __name__ == "__main__":
    main()
