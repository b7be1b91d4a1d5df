"""Trials of a tuning study on many cores: Ray tasks that share the study in its database."""

from __future__ import annotations

from trappm.cluster.runtime import here, ray_runtime
from trappm.learner.bench.tuning import OnTrial, StudyReport, Tuning, progress, run_trials
from trappm.profiler.errors import CampaignError, one_line
from trappm.store import Home, StoreAccess

POLL_S = 2.0


def tune_on_ray(
    tuning: Tuning, total: int, *, workers: int, address: str | None, on_trial: OnTrial
) -> StudyReport:
    """As `run_trials`, by so many workers at once; a trial or two may be too many.

    Workers on other nodes need a database that they can reach, so with SQLite all stay on this
    one. A worker that dies costs its trial only.

    Raises:
        CampaignError: Ray cannot be started or reached, or no worker could go on.
    """
    with ray_runtime(address):
        import ray
        from ray.exceptions import RayError

        place = here() if tuning.storage_url.startswith("sqlite") else {}
        task = ray.remote(**{**place, "num_cpus": 1, "max_retries": 2})(_work)
        shared, access = ray.put(tuning), StoreAccess.of(Home.find())
        running = [task.remote(access, shared, total) for _ in range(workers)]
        try:
            while running:
                ready, running = ray.wait(running, timeout=POLL_S)
                ray.get(ready)
                done, best = progress(tuning)
                on_trial(done, total, best)
        except RayError as error:
            raise CampaignError(
                f"tuning on Ray broke off ({one_line(error)}); the same command goes on"
            ) from error
    # What is left to do here is to tell.
    return run_trials(tuning, total, on_trial)


def _work(access: StoreAccess, tuning: Tuning, total: int) -> None:
    import torch

    access.take_over()
    torch.set_num_threads(1)
    run_trials(tuning, total, lambda done, total, best: None)
