"""`python -m research replay` without its options: many campaigns at once, kept as they end.

Each process prepares the labels for itself, from the profiles that the store keeps, so nothing
large is sent between processes. A campaign's points are appended to the results file when it ends;
a run that was stopped goes on behind what is there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path

from filelock import FileLock

from research.evaluation.worker_processes import submit, worker_pool
from research.replay.peers import check_installed
from research.replay.replay import Bench, Point, replay
from trappm import __version__
from trappm.profiler.errors import InputError, TrappmError
from trappm.profiler.progress import Watch

BENCH = 4
"""Counted up when a campaign of the same labels, learner, strategy and seed may come out otherwise:
a strategy, a prior, a learner, the division or the errors changed. Kept results of other code are
then not continued with."""
ENCODER_SEED = 1337
"""Of encoders, which all campaigns of a learner share: none depends on which others are run."""
MAX_RESULTS_BYTES = 256 << 20
QUICK = "quick"
"""The learner that is one Gaussian process (`joint`); the others are estimators by name."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which campaigns to run: every learner with every strategy and seed."""

    labels: Path
    metric: str
    """A column, such as `memory_mib`."""
    strategies: Sequence[str]
    learners: Sequence[str] = (QUICK,)
    seeds: Sequence[int]
    budgets: Sequence[int]
    usable: Path | None = None

    @property
    def identity(self) -> str:
        """Of labels, metric, budgets and code: results of others are not mixed with these."""
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
    """The file of finished campaigns, one JSON object a line."""

    path: Path
    identity: str
    points: dict[Job, list[Point]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, identity: str) -> Results:
        """What is there of these labels; a line that was cut off is left out.

        Raises:
            InputError: the file cannot be read, a whole line of it is no result, or there is no
                folder to write it to.
        """
        results = cls(path, identity)
        try:
            if path.stat().st_size > MAX_RESULTS_BYTES:
                raise InputError(
                    f"{path} has more than {MAX_RESULTS_BYTES >> 20} MiB; give another"
                )
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            if not path.absolute().parent.is_dir():
                raise InputError(f"there is no folder {path.parent} for the results") from None
            return results
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path} cannot be read: {error}") from error
        for number, line in enumerate(text.splitlines(keepends=True), start=1):
            if not line.endswith("\n"):
                break  # the process that wrote it was killed
            try:
                row = json.loads(line)
                if row["of"] == identity:
                    job = Job(row["seed"], row["learner"], row["strategy"])
                    results.points[job] = [Point(**point) for point in row["points"]]
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(f"{path}, line {number} is no result: {error}") from error
        return results

    def add(self, job: Job, points: Sequence[Point]) -> None:
        """Appends a campaign; other processes may do so at the same time."""
        self.points[job] = list(points)
        row = {"of": self.identity, **asdict(job), "points": [asdict(p) for p in points]}
        self.path.touch()
        lock = self.path.with_name(f"{self.path.name}.lock")
        with FileLock(lock), self.path.open("rb+") as file:
            # What a killed process left of its last line must not spoil this one.
            whole = file.read().rfind(b"\n") + 1
            file.seek(whole)
            file.truncate()
            file.write((json.dumps(row) + "\n").encode())


def run(plan: Plan, results: Results, *, processes: int, watch: Watch) -> None:
    """Runs the campaigns that are missing.

    Raises:
        InputError: the labels cannot be read, or a learner or strategy lacks what it needs.
        TrappmError: a process ended; what was done until then is kept.
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
    for job, points in _each(plan, missing, processes, watch):
        results.add(job, points)
        done += 1
        watch(done, len(jobs), f"{job.learner}, {job.strategy}, seed {job.seed}")


def _each(
    plan: Plan, jobs: Sequence[Job], processes: int, watch: Watch
) -> Iterator[tuple[Job, list[Point]]]:
    benches = Benches(plan, watch=watch)  # makes what profiles are missing, once
    if processes == 1:
        for job in jobs:
            yield job, benches.play(job)
        return
    try:
        with worker_pool(min(processes, len(jobs)), _begin_worker, plan) as workers:
            running = {submit(workers, _play, job): job for job in jobs}
            for future in as_completed(running):
                yield running[future], future.result()
    except BrokenProcessPool as error:
        raise TrappmError("a replaying process ended; the same command goes on") from error


class Benches:
    """The labels of a plan, and a bench for each learner."""

    def __init__(self, plan: Plan, watch: Watch = lambda done, total, what: None) -> None:
        from research.evaluation.label_files import read_labels, read_usable
        from research.evaluation.workbench import opened_workbench
        from trappm.learner.paper.presets import LAPTOP
        from trappm.learner.physics.starting_prior import prior_on_card

        self._plan = plan
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
        # Whatever the learner, choices are made from the embeddings that a campaign has by default.
        encoder = self._workbench.encoder(samples, LAPTOP.encoder, pretrained=True)
        self._embeddings = encoder.embed([w.graph for w in samples.workloads])
        self._by_learner: dict[str, Bench] = {}

    def play(self, job: Job) -> list[Point]:
        return list(replay(self.bench(job.learner), job.strategy, job.seed, self._plan.budgets))

    def bench(self, learner: str) -> Bench:
        if learner not in self._by_learner:
            from research.peers.predictors import OF_PHYSICS

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


_BENCHES: list[Benches] = []


def _begin_worker(plan: Plan) -> None:
    with contextlib.redirect_stdout(None):
        _BENCHES.append(Benches(plan))


def _play(job: Job) -> list[Point]:
    return _BENCHES[0].play(job)
