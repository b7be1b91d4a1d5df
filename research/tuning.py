"""`python -m research tune`: tuning of a predictor by cross-validation with Optuna.

A trial's error is the mean over folds of whole architectures. Only the training architectures of
the main split (`research.evaluation.benchmark`, seed 1337) are used, so the test set stays unseen.
After each fold, a trial is pruned if it is worse than the median. The first trial has the shipped
settings. `ours` cannot be tuned, because every fit weights its parts by cross-validation. Studies
are stored in studies.db of the data folder.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from research.evaluation.benchmark import PAPER_SEEDS, Samples, SplitKind, splits_of
from research.evaluation.command import GraphProcesses, MetricName
from research.evaluation.label_files import metric_column, read_labels
from research.evaluation.workbench import Workbench, show_progress
from research.peers.baselines import Boosting, xgboost
from research.peers.graph_networks import LAPTOP_SIZE, dippm, nnlqp
from trappm.cli.options import AsJson, print_json
from trappm.learner.interface import Estimator
from trappm.learner.paper.encoder import Encoder
from trappm.learner.paper.estimators import paper_estimator
from trappm.learner.paper.presets import (
    LAPTOP,
    PAPER,
    PRESETS,
    HeadPreset,
    LearnerPreset,
    Training,
)
from trappm.learner.stats.folds import grouped_folds
from trappm.profiler.errors import InputError, from_extra
from trappm.profiler.records import Watch, number_text
from trappm.terminal.tables import console, print_table

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

FOLDS = 5
STARTUP_TRIALS = 5
"""Number of initial trials, which are drawn at random and never pruned."""
MAX_TRIALS = 10_000

Settings = Mapping[str, Any]


def tune(
    labels: Annotated[Path, typer.Option(help="Labels: an export, or a published sheet.")],
    estimator: Annotated[
        str, typer.Option(help="Name of a predictor with settings.")
    ] = "trappm-laptop",
    metric: MetricName = "memory",
    trials: Annotated[
        int, typer.Option(min=1, max=MAX_TRIALS, help="Total number of trials of the study.")
    ] = 30,
    processes: GraphProcesses = None,
    as_json: AsJson = False,
) -> None:
    """Search for better settings, starting with the shipped ones.

    The same command on the same labels continues the study.
    """
    space_of(estimator)  # before anything expensive
    preset = PRESETS.get(estimator.removeprefix("trappm-"))
    bench = Workbench(
        metric=metric_column(metric), processes=processes or len(os.sched_getaffinity(0))
    )
    samples = bench.prepared(read_labels(labels)).samples
    encoder = None
    if preset is not None:
        encoder = bench.encoder(samples, preset.encoder, pretrained=True)
    tuning = Tuning(f"sqlite:///{bench.home.path / 'studies.db'}", estimator, samples, encoder)
    report = run_trials(tuning, trials, show_progress)
    if as_json:
        print_json(report)
        return
    counts = report["trials"]
    console().print(f"{counts['complete']} trials completed, {counts['pruned']} pruned")
    rows = [
        (which, trial["trial"], trial["mape"],
         ", ".join(f"{k} {number_text(v)}" for k, v in trial["settings"].items()))
        for which in ("shipped", "best")
        if (trial := report[which])
    ]  # fmt: skip
    print_table("", ("which", "trial", "MAPE_%", "settings"), rows)


@dataclass(frozen=True)
class Space:
    """Search space of an estimator."""

    shipped: Settings
    suggest: Callable[[Trial], Settings]
    make: Callable[[Settings, Encoder | None], Estimator]


@dataclass(frozen=True)
class Tuning:
    """An estimator to tune on labels."""

    storage_url: str
    """URL of the study's database."""
    estimator: str
    samples: Samples
    encoder: Encoder | None
    """Pre-trained encoder for estimators that need it."""
    seed: int = PAPER_SEEDS[0]

    @property
    def study(self) -> str:
        """Return the name of the study, which is unique for each set of labels."""
        identity = repr(self.samples.configurations).encode() + self.samples.values.tobytes()
        return f"{self.estimator} {hashlib.sha256(identity).hexdigest()[:12]}"


def run_trials(tuning: Tuning, total: int, watch: Watch) -> dict[str, Any]:
    """Continue the study until it has this many trials.

    Returns:
        Estimator, numbers of completed and pruned trials, and the best and the shipped trial with
        number, mean error in percent and settings.

    Raises:
        InputError: The estimator cannot be tuned, or Optuna is not installed.
    """
    space = space_of(tuning.estimator)
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        study_name=tuning.study, storage=tuning.storage_url, load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=STARTUP_TRIALS),
    )  # fmt: skip
    # A continued study must not repeat its draws.
    study.sampler = optuna.samplers.TPESampler(
        n_startup_trials=STARTUP_TRIALS, seed=tuning.seed + len(study.trials)
    )
    study.enqueue_trial(dict(space.shipped), skip_if_exists=True)
    (split,) = splits_of(tuning.samples, SplitKind.ARCHITECTURES, PAPER_SEEDS[:1])
    rows = np.flatnonzero(split.train)
    folds = grouped_folds(
        [tuning.samples.groups[i] for i in rows], FOLDS, np.random.default_rng(tuning.seed)
    )

    def objective(trial: Trial) -> float:
        settings = space.suggest(trial)
        estimator = space.make(settings, tuning.encoder)
        errors: list[float] = []
        for fold in np.unique(folds):
            errors.append(_error(estimator, tuning, rows[folds != fold], rows[folds == fold]))
            trial.report(float(np.mean(errors)), step=len(errors))
            if trial.should_prune():
                raise optuna.TrialPruned
        return float(np.mean(errors))

    while (done := len(_trials(study, "COMPLETE", "PRUNED"))) < total:
        watch(done, total, "trials")
        study.optimize(objective, n_trials=1)
    watch(total, total, "trials")
    return _report(study, tuning)


def space_of(name: str) -> Space:
    """Return the settings of an estimator.

    Raises:
        InputError: The estimator has no settings, or Optuna is not installed.
    """
    with from_extra("evaluate", "tuning"):
        import optuna  # noqa: F401
    spaces = _spaces()
    if name not in spaces:
        reason = (
            "weighs its parts by cross-validation in every fit" if name == "ours" else "has none"
        )
        raise InputError(f"{name} {reason}; tunable estimators: {', '.join(spaces)}")
    return spaces[name]


def _error(
    estimator: Estimator,
    tuning: Tuning,
    train: npt.NDArray[np.int64],
    test: npt.NDArray[np.int64],
) -> float:
    """Return the mean absolute percentage error of one fold."""
    samples = tuning.samples
    model = estimator.fit(
        samples.at(train), samples.targets(train), np.random.default_rng(tuning.seed)
    )
    test = test[samples.judged[test] & ~np.isnan(samples.values[test])]
    if not len(test):
        raise InputError("a fold has no label to evaluate on; add more labels")
    predicted = model.predict(samples.at(test)).median
    return 100 * float(np.mean(np.abs(predicted / samples.values[test] - 1)))


def _trials(study: Study, *states: str) -> list[FrozenTrial]:
    return [t for t in study.get_trials(deepcopy=False) if t.state.name in states]


def _report(study: Study, tuning: Tuning) -> dict[str, Any]:
    def summary(trial: FrozenTrial) -> dict[str, Any]:
        return {"trial": trial.number, "mape": trial.value, "settings": trial.params}

    done = _trials(study, "COMPLETE")
    shipped = [t for t in done if "fixed_params" in t.system_attrs]
    return {
        "estimator": tuning.estimator,
        "best": summary(min(done, key=lambda trial: trial.value or np.inf)) if done else None,
        "shipped": summary(shipped[0]) if shipped else None,
        "trials": {state.lower(): len(_trials(study, state)) for state in ("COMPLETE", "PRUNED")},
    }


def _spaces() -> dict[str, Space]:
    baselines = {"nnlqp": nnlqp, "dippm": dippm}
    return {
        "trappm-laptop": _published(LAPTOP),
        "trappm-paper": _published(PAPER),
        **{name: _network(maker) for name, maker in baselines.items()},
        "xgboost": Space(asdict(Boosting()), _boosting, lambda s, _: xgboost(Boosting(**s))),
    }


def _training(trial: Trial, shipped_width: int) -> dict[str, Any]:
    # The time grows with the square of the width; the paper's width is in its preset.
    widths = [round(shipped_width * share) for share in (0.25, 0.5, 1, 2)]
    return {
        "learning_rate": trial.suggest_float("learning_rate", 3e-4, 3e-2, log=True),
        "weight_decay": trial.suggest_float("weight_decay", 1e-6, 1e-1, log=True),
        "width": trial.suggest_categorical("width", widths),
    }


def _shipped(training: Training, width: int) -> dict[str, Any]:
    return {
        "learning_rate": training.learning_rate,
        "weight_decay": max(training.weight_decay, 1e-6),
        "width": width,
    }


def _published(preset: LearnerPreset) -> Space:
    """Return the space of the regressor over a fixed encoder."""

    def suggest(trial: Trial) -> Settings:
        return _training(trial, preset.head.widths[0]) | {
            "dropout": trial.suggest_float("dropout", 0.0, 0.3)
        }

    def make(settings: Settings, encoder: Encoder | None) -> Estimator:
        if encoder is None:
            raise InputError(f"trappm-{preset.name} needs an encoder")
        fields = dict(settings)
        width = fields.pop("width")
        head: HeadPreset = replace(
            preset.head, widths=(width, width), hidden=(width, width), **fields
        )
        return paper_estimator(f"trappm-{preset.name}", head, encoder)

    shipped = _shipped(preset.head, preset.head.widths[0]) | {"dropout": preset.head.dropout}
    return Space(shipped, suggest, make)


def _network(maker: Callable[..., Estimator]) -> Space:
    def make(settings: Settings, _encoder: Encoder | None) -> Estimator:
        fields = dict(settings)
        width = fields.pop("width")
        training = replace(LAPTOP_SIZE.training, **fields)
        return maker(replace(LAPTOP_SIZE, width=width, training=training))

    def suggest(trial: Trial) -> Settings:
        return _training(trial, LAPTOP_SIZE.width)

    return Space(_shipped(LAPTOP_SIZE.training, LAPTOP_SIZE.width), suggest, make)


def _boosting(trial: Trial) -> Settings:
    return {
        "n_estimators": trial.suggest_int("n_estimators", 50, 2000, log=True),
        "max_depth": trial.suggest_int("max_depth", 2, 12),
        "learning_rate": trial.suggest_float("learning_rate", 0.01, 0.5, log=True),
        "subsample": trial.suggest_float("subsample", 0.3, 1.0),
    }
