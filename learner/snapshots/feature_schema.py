"""Hashes of the features that heads see: a snapshot of other features must not predict.

Constants and trees identify features by their place only. A feature that is added, or computed
differently, would silently change their predictions.
"""

from __future__ import annotations

import hashlib
from functools import cache

from trappm.learner.physics.kernel_times import GROUPS, SHARE_GROUPS
from trappm.learner.physics.memory_prior import FEATURE_GROUPS
from trappm.learner.residual import graph_features
from trappm.profiler.graphs import features
from trappm.profiler.simulation.kernel_profile import KernelKind, Size

VERSIONS = {"graph": 1, "memory": 1, "kernels": 3}
"""Raised whenever code computes other values for the same features, even if their names and shapes
stay: `tests/learner/physics/test_kernel_features.py` has the values of each version."""


@cache
def feature_schema() -> dict[str, str]:
    """Return a short hash of the features of each part: graphs, memory, kernels."""
    schema = {
        "graph": (VERSIONS["graph"], features.OPERATORS, graph_features.OPERATORS),
        "memory": (VERSIONS["memory"], FEATURE_GROUPS, graph_features.CONVOLUTION_FEATURES),
        "kernels": (
            VERSIONS["kernels"],
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
