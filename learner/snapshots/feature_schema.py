"""Hashes of the features that heads see: a snapshot of other features must not predict.

Constants and trees know their features by place only, so a kind of operator or kernel that came
between would silently change their predictions.
"""

from __future__ import annotations

import hashlib
from functools import cache

from trappm.learner.physics.kernel_times import GROUPS, SHARE_GROUPS
from trappm.learner.physics.memory_prior import FEATURE_GROUPS
from trappm.learner.residual import graph_features
from trappm.profiler.graphs import features
from trappm.profiler.simulation.kernel_profile import KernelKind, Size


@cache
def feature_schema() -> dict[str, str]:
    """A short hash by what is described: graphs, memory, kernels."""
    schema = {
        "graph": (features.OPERATORS, graph_features.OPERATORS),
        "memory": (FEATURE_GROUPS, graph_features.CONVOLUTION_FEATURES),
        "kernels": (
            [kind.name for kind in KernelKind],
            [size.name for size in Size],
            [(group.name, group.shape) for group in GROUPS],
            SHARE_GROUPS,
        ),
    }
    return {
        name: hashlib.sha256(repr(value).encode()).hexdigest()[:16]
        for name, value in schema.items()
    }
