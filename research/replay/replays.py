"""Many replayed campaigns at once, kept as they end.

Each process prepares the labels for itself, from the profiles that the store keeps, so nothing
large is sent between processes. A campaign's points are appended to the results file when it ends;
an interrupted run continues there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path

import joblib  # type: ignore[import-untyped]
from filelock import FileLock

from research.evaluation.label_files import read_labels, read_usable
from research.evaluation.workbench import Workbench, opened_workbench
from research.peers.predictors import OF_PHYSICS
from research.replay.replay import Bench, Point, replay
from research.replay.strategies import check_installed
from trappm import __version__
from trappm.learner.paper.presets import LAPTOP
from trappm.learner.physics.starting_prior import prior_on_card
from trappm.profiler.errors import InputError, TrappmError
from trappm.profiler.progress import Watch

BENCH = 4
"""Counted up when a campaign of the same labels, learner, strategy and seed may come out otherwise:
a strategy, a prior, a learner, the division or the errors changed. Kept results of other code are
then not continued."""
ENCODER_SEED = 1337
"""Seed of encoders, which all campaigns of a learner share: none depends on the others."""
QUICK = "quick"
"""The learner that is one Gaussian process (`joint`); the others are estimators by name."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Campaigns to run: every learner with every strategy and seed."""

    labels: Path
    metric: str
    """Column of the metric, such as `memory_mib`."""
    strategies: Sequence[str]
    learners: Sequence[str] = (QUICK,)
    seeds: Sequence[int]
    budgets: Sequence[int]
    usable: Path | None = None

    @property
    def identity(self) -> str:
        """Hash of labels, metric, budgets and code; results of others are not mixed with these."""
        digest = hashlib.sha256(self.labels.read_bytes())
        if self.usable is not None:
            digest.update(self.usable.read_bytes())
        digest.update(repr((self.metric, tuple(self.budgets), __version__, BENCH)).encode())
        return digest.hexdigest()[:16]


@dataclass(frozen=True, order=True)
class Job:
    """One campaign to replay: learner, strategy and seed."""

    seed: int
    learner: str
    strategy: str


@dataclass
class Results:
    """The file of finished campaigns, one JSON object per line."""

    path: Path
    identity: str
    points: dict[Job, list[Point]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, identity: str) -> Results:
        """Read the results of these labels; an incomplete last line is left out.

        Raises:
            InputError: The file cannot be read, a line of it is not a result, or there is no folder
                to write it to.
        """
        results = cls(path, identity)
        if not path.absolute().parent.is_dir():
            raise InputError(f"there is no folder {path.parent} for the results")
        try:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        except FileNotFoundError:
            return results
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path} cannot be read: {error}") from error
        for number, line in enumerate(lines, start=1):
            if not line.endswith("\n"):
                break  # the process that wrote it was killed
            try:
                row = json.loads(line)
                if row["of"] == identity:
                    job = Job(row["seed"], row["learner"], row["strategy"])
                    results.points[job] = [Point(**point) for point in row["points"]]
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(f"{path}, line {number} is not a result: {error}") from error
        return results

    def add(self, job: Job, points: Sequence[Point]) -> None:
        """Append a campaign; other processes may do so at the same time."""
        self.points[job] = list(points)
        row = {"of": self.identity, **asdict(job), "points": [asdict(p) for p in points]}
        self.path.touch()
        with FileLock(f"{self.path}.lock"), self.path.open("rb+") as file:
            # An incomplete last line of a killed process must not spoil this one.
            file.truncate(file.read().rfind(b"\n") + 1)
            file.seek(0, 2)
            file.write((json.dumps(row) + "\n").encode())


def run(plan: Plan, results: Results, *, processes: int, watch: Watch) -> None:
    """Run the campaigns that are missing.

    Raises:
        InputError: The labels cannot be read, or a learner or strategy lacks what it needs.
        TrappmError: A process ended; everything that was finished before is kept.
    """
    jobs = [
        Job(seed, learner, strategy)
        for seed in plan.seeds
        for learner in plan.learners
        for strategy in plan.strategies
    ]
    missing = [job for job in jobs if job not in results.points]
    done = len(jobs) - len(missing)
    watch(done, len(jobs), "preparing")
    if not missing:
        return
    check_installed({job.strategy for job in missing})
    for job, points in _played(plan, missing, processes, watch):
        results.add(job, points)
        done += 1
        watch(done, len(jobs), f"{job.learner}, {job.strategy}, seed {job.seed}")


def _played(
    plan: Plan, jobs: Sequence[Job], processes: int, watch: Watch
) -> Iterator[tuple[Job, list[Point]]]:
    benches = Benches(plan, watch)  # makes missing profiles once
    if processes == 1:
        yield from ((job, benches.play(job)) for job in jobs)
        return
    with joblib.parallel_config("loky", inner_max_num_threads=1):
        workers = joblib.Parallel(min(processes, len(jobs)), return_as="generator_unordered")
        try:
            yield from workers(joblib.delayed(_play)(plan, job) for job in jobs)
        except BrokenProcessPool as error:
            raise TrappmError("a replaying process ended; the same command continues") from error


def _play(plan: Plan, job: Job) -> tuple[Job, list[Point]]:
    if plan.identity not in _BENCHES:
        _BENCHES[plan.identity] = Benches(plan)
    return job, _BENCHES[plan.identity].play(job)


_BENCHES: dict[str, Benches] = {}
"""Benches of a worker process by the identity of their plan."""


class Benches:
    """The labels of a plan, and a bench for each learner."""

    def __init__(self, plan: Plan, watch: Watch = lambda done, total, what: None) -> None:
        self._plan = plan
        self._workbench: Workbench
        with opened_workbench(
            plan.metric,
            processes=1,
            encoder_seed=ENCODER_SEED,
            usable=None if plan.usable is None else read_usable(plan.usable),
            watch=watch,
        ) as self._workbench:
            self._prepared = self._workbench.prepared(read_labels(plan.labels))
        samples = self._prepared.samples
        kernels = all(w.kernels is not None for w in samples.workloads)
        self._prior = prior_on_card(plan.metric, self._prepared.card, kernels=kernels)
        # Every learner's choices use the embeddings that a campaign has by default.
        encoder = self._workbench.encoder(samples, LAPTOP.encoder, pretrained=True)
        self._embeddings = encoder.embed([w.graph for w in samples.workloads])
        self._by_learner: dict[str, Bench] = {}

    def play(self, job: Job) -> list[Point]:
        return list(replay(self.bench(job.learner), job.strategy, job.seed, self._plan.budgets))

    def bench(self, learner: str) -> Bench:
        if learner not in self._by_learner:
            estimator = None
            if learner != QUICK:
                estimator = self._workbench.estimator(learner, self._prepared)
            self._by_learner[learner] = Bench(
                samples=self._prepared.samples,
                embeddings=self._embeddings,
                prior=self._prior,
                estimator=estimator,
                knows_physics=learner == QUICK or learner in OF_PHYSICS,
                times=self._plan.metric == "step_time_ms",
            )
        return self._by_learner[learner]
