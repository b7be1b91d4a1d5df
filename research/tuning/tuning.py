"""Tuning of a predictor's settings by cross-validation, as an Optuna study in a database.

A trial's error is the mean over folds of whole architectures, and only architectures that the
first honest split (`research.evaluation.benchmark`, seed 1337) trains on take part: what is
held out there stays unseen. After each fold a trial that is worse than the median of the others so
far is given up. The first trial is what we ship, so that a study shows how much better its best is.

Ours has nothing to tune here: it weighs its parts by cross-validation in every fit.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import numpy.typing as npt

from research.evaluation.benchmark import PAPER_SEEDS, Samples, SplitKind, splits_of
from research.peers.dippm import dippm
from research.peers.dnnperf import dnnperf
from research.peers.nnlqp import nnlqp
from research.peers.sizes import LAPTOP_SIZE
from research.peers.tabular import Boosting, xgboost
from trappm.learner.estimator import Estimator
from trappm.learner.paper.encoder import Encoder
from trappm.learner.paper.presets import LAPTOP, PAPER, HeadPreset, LearnerPreset, Training
from trappm.learner.paper.regressor import TrappmAsPublished
from trappm.learner.stats.folds import grouped_folds
from trappm.profiler.errors import InputError, from_extra

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

FOLDS = 5
STARTUP_TRIALS = 5
"""Trials before the first is given up, and drawn at random."""
HEARTBEAT_S = 60
"""A trial whose process has been silent for twice as long counts as failed."""

Settings = Mapping[str, Any]
OnTrial = Callable[[int, int, float | None], None]
"""Called with trials done, how many in all, and the least error so far in percent."""


@dataclass(frozen=True)
class Space:
    """What is tuned of an estimator."""

    shipped: Settings
    suggest: Callable[[Trial], Settings]
    make: Callable[[Settings, Encoder | None], Estimator]


@dataclass(frozen=True)
class Tuning:
    """A study: everything that a worker needs to take part."""

    study: str
    storage_url: str = field(repr=False)  # it may hold a password
    """Of the label store, which Optuna adds its tables to."""
    estimator: str
    samples: Samples
    encoder: Encoder | None
    """Pre-trained, for the estimators that need one."""
    seed: int = PAPER_SEEDS[0]


class TrialSummary(TypedDict):
    """A trial: its number, mean error in percent, and settings."""

    trial: int
    mape: float | None
    settings: dict[str, Any]


class StudyReport(TypedDict):
    """The trials of a study so far."""

    study: str
    estimator: str
    best: TrialSummary | None
    shipped: TrialSummary | None
    """The first trial, whose settings are those that are shipped."""
    trials: dict[str, int]
    """How many were completed, given up and failed, by the name of Optuna's state."""


def run_trials(tuning: Tuning, total: int, on_trial: OnTrial) -> StudyReport:
    """Goes on with the study until it has so many trials; several processes may at once.

    Raises:
        InputError: the estimator has nothing to tune, or Optuna is not installed.
    """
    import optuna

    space = space_of(tuning.estimator)
    study = _open(tuning, space)
    optuna.storages.fail_stale_trials(study)
    rows = _training_rows(tuning.samples)
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

    while (done := _finished(study)) < total:
        on_trial(done, total, _least(study))
        study.optimize(objective, n_trials=1)
    on_trial(total, total, _least(study))
    return _report(study, tuning)


def progress(tuning: Tuning) -> tuple[int, float | None]:
    """Trials that a study has, and the least error so far in percent."""
    study = _open(tuning, space_of(tuning.estimator))
    return _finished(study), _least(study)


def space_of(name: str) -> Space:
    """Raises InputError for an estimator without settings to tune, or where Optuna is missing."""
    with from_extra("evaluate", "tuning"):
        import optuna  # noqa: F401
    spaces = _spaces()
    if name not in spaces:
        reason = (
            "weighs its parts by cross-validation in every fit" if name == "ours" else "has none"
        )
        raise InputError(f"{name} {reason}; what can be tuned are: {', '.join(spaces)}")
    return spaces[name]


def _open(tuning: Tuning, space: Space) -> Study:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # Of heartbeats, whose interface may change; our Optuna is pinned.
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    # Optuna takes the label store's mark of its schema for one of its own, so it must not look.
    storage = optuna.storages.RDBStorage(
        tuning.storage_url, skip_compatibility_check=True, heartbeat_interval=HEARTBEAT_S
    )
    study = optuna.create_study(
        study_name=tuning.study, storage=storage, direction="minimize", load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=STARTUP_TRIALS),
    )  # fmt: skip
    shipped = optuna.trial.FixedTrial(dict(space.shipped))
    space.suggest(shipped)  # type: ignore[arg-type]  # it draws what it was given
    subject = {
        "estimator": tuning.estimator,
        "labels": len(tuning.samples),
        "values": float(np.nansum(tuning.samples.values)),
        "space": str(sorted(shipped.distributions.items())),
    }
    known = {key: study.user_attrs.get(key) for key in subject} if study.user_attrs else {}
    if known and known != subject:
        raise InputError(
            f"the study {tuning.study!r} is about {known['estimator']} on {known['labels']} other "
            "labels, or draws from other settings; give another name with --study"
        )
    if not known:
        for key, value in subject.items():
            study.set_user_attr(key, value)
        study.enqueue_trial(dict(space.shipped), skip_if_exists=True)
    # A study that goes on must not draw again what it has drawn.
    study.sampler = optuna.samplers.TPESampler(
        n_startup_trials=STARTUP_TRIALS, seed=tuning.seed + len(study.get_trials(deepcopy=False))
    )
    return study


def _training_rows(samples: Samples) -> npt.NDArray[np.int64]:
    (split,) = splits_of(samples, SplitKind.ARCHITECTURES, PAPER_SEEDS[:1])
    return np.flatnonzero(split.train)


def _error(
    estimator: Estimator,
    tuning: Tuning,
    train: npt.NDArray[np.int64],
    test: npt.NDArray[np.int64],
) -> float:
    """Mean absolute percentage error of one fold."""
    samples = tuning.samples
    model = estimator.fit(
        samples.at(train), samples.targets(train), np.random.default_rng(tuning.seed)
    )
    test = test[samples.judged[test] & ~np.isnan(samples.values[test])]
    if not len(test):
        raise InputError("a fold has no label to judge by; give more labels")
    predicted = model.predict(samples.at(test)).median
    return 100 * float(np.mean(np.abs(predicted / samples.values[test] - 1)))


def _finished(study: Study) -> int:
    from optuna.trial import TrialState

    states = (TrialState.COMPLETE, TrialState.PRUNED)
    return len(study.get_trials(deepcopy=False, states=states))


def _least(study: Study) -> float | None:
    from optuna.trial import TrialState

    done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return min((trial.value for trial in done if trial.value is not None), default=None)


def _report(study: Study, tuning: Tuning) -> StudyReport:
    from optuna.trial import TrialState

    def summary(trial: FrozenTrial) -> TrialSummary:
        return {"trial": trial.number, "mape": trial.value, "settings": trial.params}

    trials = study.get_trials(deepcopy=False)
    done = [trial for trial in trials if trial.state is TrialState.COMPLETE]
    shipped = [t for t in done if "fixed_params" in t.system_attrs]
    return {
        "study": tuning.study,
        "estimator": tuning.estimator,
        "best": summary(min(done, key=lambda trial: trial.value or np.inf)) if done else None,
        "shipped": summary(shipped[0]) if shipped else None,
        "trials": {
            state.name.lower(): sum(trial.state is state for trial in trials)
            for state in (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
        },
    }


def _spaces() -> dict[str, Space]:
    baselines = {"nnlqp": nnlqp, "dippm": dippm, "dnnperf": dnnperf}
    return {
        "trappm-laptop": _published(LAPTOP),
        "trappm-paper": _published(PAPER),
        **{name: _network(maker) for name, maker in baselines.items()},
        "xgboost": Space(asdict(Boosting()), _boosting, lambda s, _: xgboost(Boosting(**s))),
    }


def _training(trial: Trial, shipped_width: int) -> dict[str, Any]:
    # Four times as wide takes 16 times as long: who wants the paper's width tunes its preset.
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
    """The regressor over a fixed encoder."""

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
        return TrappmAsPublished(f"trappm-{preset.name}", head, encoder)

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
