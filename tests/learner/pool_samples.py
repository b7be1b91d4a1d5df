"""A made-up pool to choose from."""

import numpy as np

from trappm.learner.acquisition import AcquisitionRequest, PoolCovariance


def request(n=60, seed=0, count=8, **options):
    """A pool of clusters of unequal size, some of it labelled."""
    generator = np.random.default_rng(seed)
    centres = generator.normal(0, 3, (8, 12))
    cluster = generator.choice(8, n, p=[0.3, 0.25, 0.2, 0.1, 0.05, 0.04, 0.03, 0.03])
    embeddings = (centres[cluster] + generator.normal(0, 0.5, (n, 12))).astype(np.float32)
    values = {
        "embeddings": embeddings,
        "static_features": np.exp(generator.normal(3, 1, (n, 6))),
        "labelled": np.arange(0, n, 10),
        "candidates": np.arange(n),
        "count": count,
        "generator": np.random.default_rng(seed + 1),
        "covariances": [PoolCovariance(generator.normal(0, 1, (n, 10)).astype(np.float32), 0.1)],
        "uncertainty": generator.uniform(0.5, 1.5, n),
    }
    return AcquisitionRequest(**{**values, **options})
