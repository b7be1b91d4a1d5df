"""Every predictor by its name: ours, the paper's, and the baselines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from trappm.learner.estimator import Estimator
from trappm.learner.paper.encoder import Encoder
from trappm.learner.paper.presets import (
    MEMBERS,
    PRESETS,
    EncoderPreset,
    HeadPreset,
)
from trappm.learner.physics.prior import Prior
from trappm.learner.workload import Workload
from trappm.profiler.errors import InputError, from_extra
from trappm.profiler.nearest import nearest

MakeEncoder = Callable[[EncoderPreset, bool], Encoder]
"""A frozen encoder of this preset, pre-trained or (False) random."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What some predictors need beyond labels."""

    metric: str
    """A metric's column, such as `memory_mib`."""
    card: str
    """Of the device: its key, such as `a100-40gb`, or the name of the card behind that."""
    make_encoder: MakeEncoder
    estimates_mib: Mapping[Workload, float]
    """FakeTensor's, where the labels came with them."""
    size: str = "laptop"
    """Of the baselines' networks: laptop or paper."""


def _prior(given: Surroundings) -> Prior:
    from trappm.learner.physics.starting_prior import prior_on_card

    return prior_on_card(given.metric, given.card)


def _ours(given: Surroundings) -> Estimator:
    from trappm.learner.heads.metric_head import Ours

    return Ours(_prior(given))


def _prior_alone(given: Surroundings) -> Estimator:
    from research.peers.prior_alone import PriorAlone

    return PriorAlone(_prior(given))


_SWITCHES: Mapping[str, Callable[[HeadPreset], HeadPreset]] = {
    "ensemble": lambda head: replace(head, members=MEMBERS),
    "huber": lambda head: replace(head, loss="huber-log"),
    "relative": lambda head: replace(head, loss="relative-squared"),
}
"""What could be chosen otherwise than the paper did, each alone."""
_SIZES = ("paper", "laptop")


def _published(preset: str, switch: str) -> Callable[[Surroundings], Estimator]:
    def make(given: Surroundings) -> Estimator:
        from trappm.learner.paper.regressor import TrappmAsPublished

        name = f"trappm-{preset}-{switch}" if switch else f"trappm-{preset}"
        chosen = PRESETS[preset]
        head = _SWITCHES[switch](chosen.head) if switch in _SWITCHES else chosen.head
        encoder = given.make_encoder(chosen.encoder, switch != "random")
        return TrappmAsPublished(name, head, encoder)

    return make


def _nnlqp(given: Surroundings) -> Estimator:
    from research.peers.nnlqp import nnlqp
    from research.peers.sizes import SIZES

    return nnlqp(SIZES[given.size])


def _dippm(given: Surroundings) -> Estimator:
    from research.peers.dippm import dippm
    from research.peers.sizes import SIZES

    return dippm(SIZES[given.size])


def _dnnperf(given: Surroundings) -> Estimator:
    from research.peers.dnnperf import dnnperf
    from research.peers.sizes import SIZES

    return dnnperf(SIZES[given.size])


def _mlp(_given: Surroundings) -> Estimator:
    from research.peers.tabular import mlp

    return mlp()


def _xgboost(_given: Surroundings) -> Estimator:
    from research.peers.tabular import xgboost

    return xgboost()


def _faketensor(given: Surroundings) -> Estimator:
    from research.peers.faketensor import FakeTensor

    if given.metric != "memory_mib" or not given.estimates_mib:
        raise InputError("faketensor needs memory labels with FakeTensor's column beside them")
    return FakeTensor(given.estimates_mib)


_SWITCHED = {
    f"trappm-{preset}-{switch}": _published(preset, switch)
    for preset in _SIZES
    for switch in _SWITCHES
}
_MAKERS: Mapping[str, Callable[[Surroundings], Estimator]] = {
    "ours": _ours,
    "prior": _prior_alone,
    **{f"trappm-{preset}": _published(preset, "") for preset in _SIZES},
    **{f"trappm-{preset}-random": _published(preset, "random") for preset in _SIZES},
    "nnlqp": _nnlqp,
    "dippm": _dippm,
    "dnnperf": _dnnperf,
    "mlp": _mlp,
    "xgboost": _xgboost,
    "faketensor": _faketensor,
    **_SWITCHED,
}

OF_PHYSICS = frozenset({"ours", "prior", "faketensor"})
"""Those that stand on a simulation; the others are purely learned."""

_BY_SKLEARN = frozenset({"mlp", "xgboost"})
"""Those that scikit-learn, or its interface to XGBoost, stands behind."""

NAMED_ONLY = frozenset(_SWITCHED)
"""The paper's method with one choice changed; evaluated only where they are named."""

ESTIMATORS: Sequence[str] = tuple(_MAKERS)
"""All names; `random` stands for the encoder of the paper's ablation, which learned nothing."""


def check_names(names: Sequence[str]) -> None:
    """Raises InputError for a name of no estimator, or of one whose library is missing."""
    for name in names:
        if name not in _MAKERS:
            raise InputError(f"no estimator {name!r}; {nearest(name, ESTIMATORS)}")
        if name in _BY_SKLEARN:
            with from_extra("evaluate", f"the estimator {name}"):
                import sklearn  # noqa: F401


def estimator_named(name: str, given: Surroundings) -> Estimator:
    """Raises InputError for a name that is none of an estimator, or what it needs is not there."""
    check_names([name])
    return _MAKERS[name](given)
