"""Boosted trees as plain arrays: grown by XGBoost, stored and evaluated without it.

XGBoost's own bytes were tried and left: with their statistics they are three times as large, which
breaks the wheel's limit, and a snapshot from elsewhere would be parsed by its C++ code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trappm.learner.workload import Array, FloatArray

Int32Array = npt.NDArray[np.int32]

ROWS_AT_ONCE = 256
"""Rows per block: larger working arrays leave the cache."""
MAX_DEPTH = 64
"""Largest depth of a stored tree; a deeper one is damaged."""


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Parameters of XGBoost."""

    rounds: int
    max_depth: int
    learning_rate: float
    subsample: float = 0.7
    column_share: float = 0.5
    """Share of the features, drawn again for each node."""
    least_in_leaf: float = 5.0
    objective: str = "reg:absoluteerror"


@dataclass(frozen=True, eq=False)
class Trees:
    """Boosted models over the same features, with the nodes of all trees in one row."""

    feature: Int32Array
    """Feature that a node splits by (nodes); 0 at leaves."""
    threshold: FloatArray
    """Values below go left (nodes); at leaves the contribution to the prediction."""
    left: Int32Array
    """Index of the left child (nodes); a leaf is its own child."""
    right: Int32Array
    roots: Int32Array
    """Root of each tree, model after model (trees)."""
    first: Int32Array
    """Index of the first tree of each model (models)."""
    start: Array
    """Prediction of each model before its first tree (models)."""
    depth: int

    def predict(self, features: Array) -> Array:
        """Return the predictions (n, models) for rows of features (n, f)."""
        points = features.astype(np.float32)
        predictions = np.empty((len(points), len(self.first)))
        for begin in range(0, len(points), ROWS_AT_ONCE):
            rows = slice(begin, begin + ROWS_AT_ONCE)
            predictions[rows] = self._predict(points[rows])
        return predictions

    def _predict(self, features: FloatArray) -> Array:
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
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        arrays |= {  # small numbers: children are near their parents
            "feature": _narrow(self.feature),
            "left": _narrow(self.left - own),
            "right": _narrow(self.right - own),
        }
        return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Read trees; raise KeyError or ValueError for other tensors."""
        arrays: dict[str, Any] = {field.name: tensors[field.name].numpy() for field in fields(cls)}
        depth = int(arrays.pop("depth"))
        nodes = len(arrays["feature"])
        arrays["feature"] = arrays["feature"].astype(np.int32)
        for side in ("left", "right"):
            arrays[side] = arrays[side].astype(np.int32) + np.arange(nodes, dtype=np.int32)
        trees = cls(**arrays, depth=depth)
        inside = [(trees.left, nodes), (trees.right, nodes), (trees.roots, nodes)]
        inside += [(trees.first, len(trees.roots)), (trees.feature, 2**31)]
        if not (
            {trees.threshold.shape, trees.left.shape, trees.right.shape} == {(nodes,)}
            and all(np.all((places >= 0) & (places < end)) for places, end in inside)
            and 0 <= depth <= MAX_DEPTH
        ):
            raise ValueError("the tensors of boosted trees do not fit together")
        return trees


def _narrow(values: Int32Array) -> npt.NDArray[Any]:
    """Return numbers of 0 and more in the smallest type that holds them."""
    most = int(values.max(initial=0))
    return values.astype(np.uint8 if most < 2**8 else np.int16 if most < 2**15 else np.int32)


def join(models: Sequence[Trees]) -> Trees:
    """Return all models side by side."""

    def joined(name: str, sizes: Sequence[int]) -> npt.NDArray[Any]:
        offsets = np.cumsum([0, *sizes], dtype=np.int32)
        parts = [getattr(m, name) + offset for m, offset in zip(models, offsets, strict=False)]
        return np.concatenate(parts)

    nodes, trees = [len(m.feature) for m in models], [len(m.roots) for m in models]
    return Trees(
        feature=np.concatenate([m.feature for m in models]),
        threshold=np.concatenate([m.threshold for m in models]),
        left=joined("left", nodes),
        right=joined("right", nodes),
        roots=joined("roots", nodes),
        first=joined("first", trees),
        start=np.concatenate([m.start for m in models]),
        depth=max(m.depth for m in models),
    )


def grow(features: Array, values: Array, growth: Growth, seed: int) -> Trees:
    """Grow one boosted model.

    Args:
        features: Finite features (n, f).
        values: Values to predict (n).
        growth: Size of the trees.
        seed: Seed of XGBoost's draws of rows and columns, below 2^31.
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
    learner = json.loads(booster.save_raw("json"))["learner"]  # its "JSON model IO" schema
    trees = [_tree(tree) for tree in learner["gradient_booster"]["model"]["trees"]]
    start = learner["learner_model_param"]["base_score"]
    start = np.array([float(str(start).strip("[]"))])
    return replace(join(trees), first=np.zeros(1, dtype=np.int32), start=start)


def _tree(tree: Mapping[str, Any]) -> Trees:
    """Return one tree of XGBoost's JSON."""
    left, right = (np.array(tree[f"{s}_children"], dtype=np.int32) for s in ("left", "right"))
    leaf = left < 0
    own = np.arange(len(left), dtype=np.int32)
    left, right = (np.where(leaf, own, child) for child in (left, right))
    depth, level = 0, np.zeros(1, dtype=np.int32)
    while len(level := level[~leaf[level]]):
        level = np.concatenate([left[level], right[level]])
        depth += 1
    zero = np.zeros(1, dtype=np.int32)
    return Trees(
        feature=np.where(leaf, 0, np.array(tree["split_indices"])).astype(np.int32),
        threshold=np.array(tree["split_conditions"], dtype=np.float32),
        left=left, right=right, roots=zero, first=zero, start=np.zeros(1), depth=depth,
    )  # fmt: skip
