"""Registry of predictors by name: TraPPM, the paper's networks, and the baselines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from research.peers.baselines import FakeTensor, PriorAlone, mlp, xgboost
from research.peers.graph_networks import SIZES, dippm, nnlqp
from trappm.learner.heads.physics_heads import Ours, starting_prior
from trappm.learner.interface import Estimator, Workload
from trappm.learner.paper.encoder import Encoder
from trappm.learner.paper.estimators import paper_estimator
from trappm.learner.paper.presets import PRESETS, EncoderPreset
from trappm.learner.physics.prior import Prior
from trappm.profiler.devices.catalogue import spec_of
from trappm.profiler.errors import InputError, from_extra, nearest

MakeEncoder = Callable[[EncoderPreset, bool], Encoder]
"""Factory of a frozen encoder of a preset, pre-trained or (False) random."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Inputs of predictors in addition to labels."""

    metric: str
    """Column of the metric, such as `memory_mib`."""
    card: str
    """Key of the device, such as `a100-40gb`, or the name of its card."""
    make_encoder: MakeEncoder
    estimates_mib: Mapping[Workload, float]
    """FakeTensor estimates, if the labels include them."""
    size: str = "laptop"
    """Size of the baselines' networks: laptop or paper."""

    @property
    def prior(self) -> Prior:
        needs_spec = self.metric in ("memory_mib", "step_time_ms")
        return starting_prior(self.metric, spec_of(self.card) if needs_spec else None, kernels=True)


def _published(preset: str, *, pretrained: bool = True) -> Callable[[Surroundings], Estimator]:
    def make(given: Surroundings) -> Estimator:
        chosen = PRESETS[preset]
        encoder = given.make_encoder(chosen.encoder, pretrained)
        name = f"trappm-{preset}" if pretrained else f"trappm-{preset}-random"
        return paper_estimator(name, chosen.head, encoder)

    return make


def _faketensor(given: Surroundings) -> Estimator:
    if given.metric != "memory_mib" or not given.estimates_mib:
        raise InputError("faketensor needs memory labels with a column of FakeTensor estimates")
    return FakeTensor(given.estimates_mib)


_MAKERS: Mapping[str, Callable[[Surroundings], Estimator]] = {
    "ours": lambda given: Ours(given.prior),
    "prior": lambda given: PriorAlone(given.prior),
    "trappm-paper": _published("paper"),
    "trappm-laptop": _published("laptop"),
    "trappm-paper-small": _published("paper-small"),
    "trappm-paper-random": _published("paper", pretrained=False),
    "trappm-laptop-random": _published("laptop", pretrained=False),
    "nnlqp": lambda given: nnlqp(SIZES[given.size]),
    "dippm": lambda given: dippm(SIZES[given.size]),
    "mlp": lambda _: mlp(),
    "xgboost": lambda _: xgboost(),
    "faketensor": _faketensor,
}

_BY_SKLEARN = frozenset({"mlp", "xgboost"})
"""Predictors that need scikit-learn, or its interface to XGBoost."""

ESTIMATORS: Sequence[str] = tuple(_MAKERS)
"""All names; `random` is the untrained encoder of the paper's ablation."""


def check_names(names: Sequence[str]) -> None:
    """Raise InputError for an unknown estimator, or one whose library is missing."""
    for name in names:
        if name not in _MAKERS:
            raise InputError(f"Unknown estimator {name!r}; {nearest(name, ESTIMATORS)}")
        if name in _BY_SKLEARN:
            with from_extra("evaluate", f"the estimator {name}"):
                import sklearn  # noqa: F401


def estimator_named(name: str, given: Surroundings) -> Estimator:
    """Return an estimator by its name.

    Raises:
        InputError: The name is unknown, or an input of the estimator is missing.
    """
    check_names([name])
    return _MAKERS[name](given)
