"""A tuning study on labels with their workloads, without the command's options."""

from __future__ import annotations

from pathlib import Path

from research.evaluation.label_files import read_labels
from research.evaluation.workbench import opened_workbench
from research.tuning.tuning import StudyReport, Tuning, run_trials
from trappm.learner.paper.presets import PRESETS
from trappm.profiler.number_text import number_text
from trappm.profiler.progress import Watch


def tune(
    labels: Path,
    *,
    estimator: str,
    metric: str,
    trials: int,
    study: str,
    processes: int,
    watch: Watch,
) -> StudyReport:
    """Goes on with the study of this name in the label store until it has so many trials.

    Raises:
        InputError: the labels cannot be read, or the study is about something else.
        StoreError: the label store cannot be used.
    """
    with opened_workbench(metric, processes=processes, watch=watch) as bench:
        samples = bench.prepared(read_labels(labels)).samples
    preset = PRESETS.get(estimator.removeprefix("trappm-"))
    encoder = None
    if preset is not None:
        encoder = bench.encoder(samples, preset.encoder, pretrained=True)
    tuning = Tuning(study, bench.home.database_url, estimator, samples, encoder)

    def on_trial(done: int, total: int, lowest: float | None) -> None:
        watch(
            done, total, "trials" if lowest is None else f"trials, best {number_text(lowest, 3)} %"
        )

    return run_trials(tuning, trials, on_trial)
