"""Strategies that only replays offer: draws by family, coverage, LCMD, and variants of `ours`.

docs/research/acquisition.md compares them; campaigns offer the strategies of
`trappm.learner.acquisition`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from scipy.cluster.vq import kmeans2  # type: ignore[import-untyped]
from torch import Tensor, nn

from trappm.learner.acquisition.pool_variance import PoolReduction
from trappm.learner.acquisition.request import AcquisitionRequest, Pick, Strategy, explain_picks
from trappm.learner.acquisition.strategies import Representation
from trappm.learner.gaussian_process import pairwise
from trappm.learner.heads.physics_heads import Head
from trappm.learner.interface import Array, FloatArray, IntArray, Model, Workload
from trappm.learner.paper.regressor import NetworkModel
from trappm.learner.physics.prior import Prior
from trappm.profiler.errors import InputError

RESIDUAL_DEVIATION = 0.08
"""Deviation of the logarithm by the residual, for its weight among gradients."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplayRequest(AcquisitionRequest):
    """A request with what only strategies of replays use."""

    families: Sequence[str] = ()
    """Family of each architecture (n)."""
    gradients: FloatArray | None = None
    """Gradients of the head's output by its weights or last layer (n, g)."""
    log_values: Array | None = None
    """Log labels in their order, NaN for runs out of memory."""


def _families(request: AcquisitionRequest) -> list[str]:
    """Return the families of the pool (n).

    Raises:
        InputError: The request has none.
    """
    families = request.families if isinstance(request, ReplayRequest) else ()
    if not families:
        raise InputError("strategies by family need the families of the pool")
    return list(families)


class Stratified:
    """A draw that gives every family its share of the pool, counting known configurations."""

    name = "stratified"

    def select(self, request: AcquisitionRequest) -> list[Pick]:
        families = np.array(_families(request))
        shares = Counter(families[np.union1d(request.open, request.known)].tolist())
        total = shares.total()
        had = Counter(families[request.known].tolist())
        remaining: dict[str, list[int]] = {}
        for index in request.generator.permutation(request.open).tolist():
            remaining.setdefault(str(families[index]), []).append(index)
        chosen: list[int] = []
        for _ in range(request.count):
            after = had.total() + 1
            owed = {name: shares[name] / total * after - had[name] for name in sorted(remaining)}
            name = max(owed, key=owed.__getitem__)
            chosen.append(remaining[name].pop())
            had[name] += 1
            if not remaining[name]:
                del remaining[name]
        return explain_picks(request, chosen)


class FacilityLocation:
    """Greedy maximum of `Representation`."""

    name = "facility"

    def select(self, request: AcquisitionRequest) -> list[Pick]:
        pool = Representation(request.points, request.known, request.generator)
        wanted = np.zeros(len(request.points), dtype=bool)
        wanted[request.open] = True
        chosen: list[int] = []
        for _ in range(request.count):
            best = int(np.argmax(np.where(wanted, pool.gains(), -1.0)))
            wanted[best] = False
            chosen.append(best)
            pool.learn(best)
        return explain_picks(request, chosen)


class Clusters:
    """Return the configuration nearest to each of `count` cluster centers, by family."""

    name = "clusters"

    def select(self, request: AcquisitionRequest) -> list[Pick]:
        families = np.array(_families(request))[request.open]
        names, sizes = np.unique(families, return_counts=True)
        # Largest remainders: every family gets its share of the picks, rounded.
        exact = request.count * sizes / max(sizes.sum(), 1)
        quota = np.floor(exact).astype(np.int64)
        for number in np.argsort(-(exact - quota), kind="stable")[: request.count - quota.sum()]:
            quota[number] += 1
        chosen: list[int] = []
        for name, count in zip(names, quota.tolist(), strict=True):
            members = request.open[families == name]
            chosen += _medoids(request.points, members, count, request.generator)
        order = request.generator.permutation(len(chosen))
        return explain_picks(request, [chosen[i] for i in order])


def _medoids(
    points: FloatArray, members: IntArray, count: int, generator: np.random.Generator
) -> list[int]:
    """Return the members nearest to the centers of `count` k-means clusters, each once."""
    if count == 0:
        return []
    own = points[members].astype(np.float64)
    first = own[generator.permutation(len(own))[:count]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # an empty cluster keeps its center
        centers, _ = kmeans2(own, first, iter=20, minit="matrix")
    apart = pairwise(own, centers)
    chosen: list[int] = []
    for number in range(count):
        best = int(apart[:, number].argmin())
        apart[best] = np.inf
        chosen.append(int(members[best]))
    return chosen


class Lcmd:
    """Largest cluster, maximum distance, on gradients of the heads.

    Holzmueller et al. 2023, "A Framework and Benchmark for Deep Batch Active Learning for
    Regression", section 4.3, in its TP form: labelled configurations are centers, too.
    """

    name = "lcmd-gradients"

    def select(self, request: AcquisitionRequest) -> list[Pick]:
        points = gradient_vectors(request)
        apart = Distances(points)
        gaps = np.full(len(points), np.inf)
        owner = np.zeros(len(points), dtype=np.int64)

        def join(index: int, number: int) -> None:
            """Add a center, with all points that are nearer to it than to any other."""
            distances = apart.to(index)
            nearer = distances < gaps
            gaps[nearer], owner[nearer] = distances[nearer], number

        for number, index in enumerate(request.known.tolist()):
            join(index, number)
        open_ = np.zeros(len(points), dtype=bool)
        open_[request.open] = True
        chosen: list[int] = []
        for number in range(len(request.known), len(request.known) + request.count):
            if number == 0:
                best = int(np.argmax(np.where(open_, apart.squares, -1.0)))
            else:
                sizes = np.bincount(owner, np.where(open_, gaps, 0.0), number)
                # A cluster without open members has size 0, like one of copies only.
                there = np.bincount(owner[open_], minlength=number) > 0
                largest = int(np.argmax(np.where(there, sizes, -1.0)))
                best = int(np.argmax(np.where(open_ & (owner == largest), gaps, -1.0)))
            chosen.append(best)
            open_[best] = False
            join(best, number)
        return explain_picks(request, chosen)


class Distances:
    """Squared distances of n points to single ones of them, without a copy of all (n, c)."""

    def __init__(self, points: FloatArray) -> None:
        self._points = points - points.mean(axis=0)  # small numbers lose less in the difference
        self.squares: Array = np.einsum("nc,nc->n", points, points, dtype=np.float64)
        """Return the distances from the origin (n)."""
        self._own: Array = np.einsum("nc,nc->n", self._points, self._points, dtype=np.float64)

    def to(self, index: int) -> Array:
        """Return the squared distances of all points to one of them (n)."""
        inner = self._points @ self._points[index]
        apart: Array = np.maximum(self._own + self._own[index] - 2.0 * inner, 0.0)
        apart[index] = 0.0
        return apart


def gradient_vectors(request: AcquisitionRequest) -> FloatArray:
    """Return gradients of the heads (n, g), or features of the covariances before there are any."""
    if isinstance(request, ReplayRequest) and request.gradients is not None:
        return request.gradients
    if request.covariances:  # a process is linear in its features: they are its gradients
        parts = [c.features / max(float(c.deviation.mean()), 1e-9) for c in request.covariances]
        return np.hstack(parts).astype(np.float32)
    return request.points


def gradients_of(model: Model, workloads: Sequence[Workload]) -> FloatArray | None:
    """Return the gradients of a learner's output for n workloads (n, g); None of other learners."""
    if isinstance(model, Head):
        return head_gradients(model, workloads)
    if isinstance(model, NetworkModel):
        return network_gradients(model, workloads)
    return None


def head_gradients(head: Head[Prior], workloads: Sequence[Workload]) -> FloatArray:
    """Return the derivatives of a head's predicted logarithm (n, g).

    They are by the prior's constants, in units of their deviation without labels, and by
    weights on the residual's features.
    """
    features = head.prior.features(workloads)
    deviation = np.repeat(np.sqrt(head.prior.feature_groups), head.prior.feature_groups)
    deviation = deviation * np.maximum(features.std(axis=0), 1e-9)
    scaled = RESIDUAL_DEVIATION * (features - features.mean(axis=0)) / deviation
    return np.hstack([head.prior.sensitivities(workloads), scaled]).astype(np.float32)


def network_gradients(model: NetworkModel, workloads: Sequence[Workload]) -> FloatArray:
    """Return derivatives of outputs by the weights of the last layers (n, networks x width)."""
    rows: list[list[Tensor]] = [[] for _ in model.networks]
    with ExitStack() as hooks:
        for network, seen in zip(model.networks, rows, strict=True):
            last = [layer for layer in network.modules() if isinstance(layer, nn.Linear)][-1]
            hook = last.register_forward_pre_hook(
                lambda _layer, inputs, seen=seen: seen.append(inputs[0])
            )
            hooks.callback(hook.remove)
        model.predict(workloads)
    joined: FloatArray = np.hstack([torch.cat(seen).numpy() for seen in rows])
    return joined / np.float32(len(rows) ** 0.5)


STUDIED: tuple[Strategy, ...] = (
    PoolReduction("ours-per-second", guarded=True, cost_power=1.0, represents=True),
    PoolReduction("variance-heads"),
    Stratified(),
    FacilityLocation(),
    Clusters(),
    Lcmd(),
)
"""Strategies that campaigns do not offer."""
