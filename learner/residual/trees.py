"""Boosted trees as plain arrays: grown by XGBoost, kept and evaluated without it.

A snapshot holds tensors only, and whoever predicts should not need the library that trained; so
the trees leave XGBoost through its documented JSON format and are walked in NumPy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

ROWS_AT_ONCE = 256
"""Rows that are evaluated together: beyond it the working arrays leave the cache."""
MAX_DEPTH = 64
"""Of a stored tree; a deeper one is damage."""


@dataclass(frozen=True, kw_only=True)
class Growth:
    """How trees are grown, in XGBoost's terms."""

    rounds: int
    max_depth: int
    learning_rate: float
    subsample: float = 0.7
    column_share: float = 0.5
    """Of the features, drawn anew for each node."""
    least_in_leaf: float = 5.0
    objective: str = "reg:absoluteerror"


@dataclass(frozen=True, eq=False)
class Trees:
    """Several boosted models over the same features; all nodes in one row, children by index."""

    feature: npt.NDArray[np.int32]
    """The feature that a node splits by (nodes); 0 at leaves."""
    threshold: npt.NDArray[np.float32]
    """Values below it go left (nodes); at leaves what is added to the prediction."""
    left: npt.NDArray[np.int32]
    """(nodes); a leaf is its own child."""
    right: npt.NDArray[np.int32]
    roots: npt.NDArray[np.int32]
    """Of each tree, the trees of a model side by side (trees)."""
    first: npt.NDArray[np.int32]
    """Index of the first tree of each model (models)."""
    start: Array
    """What each model predicts before its first tree (models)."""
    depth: int

    def predict(self, features: Array) -> Array:
        """Predictions of each model for n rows of features: (n, models)."""
        points = features.astype(np.float32)
        predictions = np.empty((len(points), len(self.first)))
        for begin in range(0, len(points), ROWS_AT_ONCE):
            rows = slice(begin, begin + ROWS_AT_ONCE)
            predictions[rows] = self._predict(points[rows])
        return predictions

    def _predict(self, features: npt.NDArray[np.float32]) -> Array:
        at = np.broadcast_to(self.roots, (len(features), len(self.roots)))
        row = np.arange(len(features))[:, None]
        for _ in range(self.depth):
            goes_left = features[row, self.feature[at]] < self.threshold[at]
            at = np.where(goes_left, self.left[at], self.right[at])
        values = self.threshold[at].astype(np.float64)
        summed: Array = np.add.reduceat(values, self.first, axis=1) + self.start
        return summed

    def tensors(self) -> dict[str, Tensor]:
        own = np.arange(len(self.feature), dtype=np.int32)
        arrays = {
            "feature": _narrow(self.feature),
            "threshold": self.threshold,
            "left": _narrow(self.left - own),  # children stand near their parents
            "right": _narrow(self.right - own),
            "roots": self.roots,
            "first": self.first,
            "start": self.start,
        }
        tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        return {**tensors, "depth": torch.tensor(self.depth)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Raises KeyError or ValueError for tensors that are not those of trees."""
        arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in tensors.items()}
        depth = int(arrays.pop("depth"))
        arrays["feature"] = arrays["feature"].astype(np.int32)
        own = np.arange(len(arrays["feature"]), dtype=np.int32)
        for side in ("left", "right"):
            arrays[side] = arrays[side].astype(np.int32) + own
        trees = cls(**{name: arrays[name] for name in cls._ARRAYS}, depth=depth)
        nodes = len(trees.feature)
        same = {trees.threshold.shape, trees.left.shape, trees.right.shape} == {(nodes,)}
        inside = all(
            np.all((a >= 0) & (a < nodes)) for a in (trees.left, trees.right, trees.roots)
        ) and np.all((trees.first >= 0) & (trees.first < len(trees.roots)))
        if not (same and inside and 0 <= depth <= MAX_DEPTH and np.all(trees.feature >= 0)):
            raise ValueError("the tensors of boosted trees do not fit together")
        return trees

    _ARRAYS = ("feature", "threshold", "left", "right", "roots", "first", "start")


def _narrow(values: npt.NDArray[np.int32]) -> npt.NDArray[Any]:
    """The same whole numbers of 0 and more in the smallest type that holds them."""
    most = int(values.max(initial=0))
    return values.astype(np.uint8 if most < 2**8 else np.int16 if most < 2**15 else np.int32)


def join(models: Sequence[Trees]) -> Trees:
    """All models of several, side by side."""
    nodes = np.cumsum([0, *(len(m.feature) for m in models)])[:-1]
    trees = np.cumsum([0, *(len(m.roots) for m in models)])[:-1]

    def moved(name: str, by: IntArray) -> npt.NDArray[np.int32]:
        shifted = [getattr(m, name) + int(o) for m, o in zip(models, by, strict=True)]
        return np.concatenate(shifted).astype(np.int32)

    return Trees(
        feature=np.concatenate([m.feature for m in models]),
        threshold=np.concatenate([m.threshold for m in models]),
        left=moved("left", nodes),
        right=moved("right", nodes),
        roots=moved("roots", nodes),
        first=moved("first", trees),
        start=np.concatenate([m.start for m in models]),
        depth=max(m.depth for m in models),
    )


def grow(features: Array, values: Array, growth: Growth, seed: int) -> Trees:
    """One boosted model with the least error, as `growth` has it, on these n rows.

    Args:
        features: (n, f), finite.
        values: (n).
        growth: the size of the trees.
        seed: of the library's draws of rows and columns, below 2^31.
    """
    import xgboost

    booster = xgboost.train(
        {
            "objective": growth.objective,
            "tree_method": "hist",
            "max_depth": growth.max_depth,
            "eta": growth.learning_rate,
            "subsample": growth.subsample,
            "colsample_bynode": growth.column_share,
            "min_child_weight": growth.least_in_leaf,
            "seed": seed,
            "nthread": 1,
            "verbosity": 0,
        },
        xgboost.DMatrix(features.astype(np.float32), values),
        num_boost_round=growth.rounds,
    )
    return _from_json(json.loads(booster.save_raw("json")))


def _from_json(model: Mapping[str, Any]) -> Trees:
    """XGBoost's own description of a model (its "JSON model IO" schema) as arrays."""
    learner = model["learner"]
    trees = learner["gradient_booster"]["model"]["trees"]
    columns: dict[str, list[npt.NDArray[Any]]] = {n: [] for n in ("f", "t", "l", "r")}
    roots, offset, depth = [], 0, 0
    for tree in trees:
        left, right = (np.array(tree[f"{s}_children"], dtype=np.int32) for s in ("left", "right"))
        leaf = left < 0
        own = np.arange(len(left), dtype=np.int32)
        left, right = (np.where(leaf, own, child) for child in (left, right))
        depth = max(depth, _depth(left, right, leaf))
        columns["f"].append(np.where(leaf, 0, np.array(tree["split_indices"])).astype(np.int32))
        columns["t"].append(np.array(tree["split_conditions"], dtype=np.float32))
        columns["l"].append((left + offset).astype(np.int32))
        columns["r"].append((right + offset).astype(np.int32))
        roots.append(offset)
        offset += len(left)
    start = learner["learner_model_param"]["base_score"]
    return Trees(
        feature=np.concatenate(columns["f"]),
        threshold=np.concatenate(columns["t"]),
        left=np.concatenate(columns["l"]),
        right=np.concatenate(columns["r"]),
        roots=np.array(roots, dtype=np.int32),
        first=np.zeros(1, dtype=np.int32),
        start=np.array([float(str(start).strip("[]"))]),
        depth=depth,
    )


def _depth(left: npt.NDArray[Any], right: npt.NDArray[Any], leaf: npt.NDArray[Any]) -> int:
    depth, level = 0, np.array([0])
    while len(level := level[~leaf[level]]):
        level = np.concatenate([left[level], right[level]])
        depth += 1
    return depth
