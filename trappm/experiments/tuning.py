"""`trappm tune` without its options: labels with their workloads, and the study that is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trappm.cluster.profiles.kernel_profiles import KernelCache
from trappm.experiments.label_files import read_labels
from trappm.experiments.labelled_workloads import prepare
from trappm.learner.bench.tuning import Tuning, run_trials
from trappm.learner.networks.kept_encoders import make_encoder
from trappm.learner.networks.presets import PRESETS
from trappm.profiler.progress import Watch
from trappm.store import Home, Store


def tune(
    labels: Path,
    *,
    estimator: str,
    metric: str,
    trials: int,
    study: str,
    workers: int,
    address: str | None,
    processes: int,
    watch: Watch,
) -> dict[str, Any]:
    """Goes on with the study of this name in the label store until it has so many trials.

    Returns:
        As `learner.bench.tuning.run_trials`.

    Raises:
        InputError: the labels cannot be read, or the study is about something else.
        StoreError: the label store cannot be used.
        CampaignError: Ray cannot be used.
    """
    home = Home.open()
    with Store.open(home.database_url) as store:
        prepared = prepare(
            read_labels(labels),
            metric,
            store,
            KernelCache(home.kernel_profiles),
            processes=processes,
            watch=watch,
        )
    samples, encoder = prepared.samples, None
    preset = PRESETS.get(estimator.removeprefix("trappm-"))
    if preset is not None:
        encoder = make_encoder(
            [workload.graph for workload in samples.workloads],
            samples.architectures,
            preset.encoder,
            pretrained=True,
            seed=Tuning.seed,
            cache=home.path / "encoders",
            on_progress=lambda done, total: watch(done, total, "pre-training the encoder"),
        )
    tuning = Tuning(study, home.database_url, estimator, samples, encoder)

    def on_trial(done: int, total: int, least: float | None) -> None:
        watch(done, total, "trials" if least is None else f"trials, best {least:.3g} %")

    if workers == 1 and address is None:
        return run_trials(tuning, trials, on_trial)
    from trappm.cluster.ray_tuning import tune_on_ray

    return tune_on_ray(tuning, trials, workers=workers, address=address, on_trial=on_trial)
