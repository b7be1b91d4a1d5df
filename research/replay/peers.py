"""The reference peer: LCMD-TP of `bmdal-reg`, behind our interface (a development dependency only).

Holzmueller et al. (2023), "A Framework and Benchmark for Deep Batch Active Learning for
Regression".
Their recommended method is LCMD-TP on sketched gradients of a trained network, begun from a random
draw; they also run it on plain features. Both choose from the same vectors that ours sees.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import nn

from trappm.learner.acquisition.request import AcquisitionRequest, Pick, explained
from trappm.learner.acquisition.strategies import RandomChoice
from trappm.learner.paper.training import torch_seeded
from trappm.profiler.errors import InputError

SKETCH = 512
"""Width of the sketched gradients, as in the paper."""
WIDTH, EPOCHS, LEARNING_RATE = 128, 200, 3e-3
"""Of the network: two hidden layers, for hundreds of labels (the paper's has three of 512)."""


class BmdalLcmd:
    """LCMD-TP, as `bmdal_reg` computes it."""

    def __init__(self, *, on_gradients: bool) -> None:
        self.name = "bmdal-lcmd-gradients" if on_gradients else "bmdal-lcmd"
        self._on_gradients = on_gradients

    def select(self, request: AcquisitionRequest) -> list[Pick]:
        """Raises InputError where `bmdal-reg` is not installed, or labels' values are missing."""
        if not len(request.known):
            return RandomChoice().select(request)
        if not request.count:
            return []
        try:
            from bmdal_reg.bmdal.algorithms import select_batch
            from bmdal_reg.bmdal.feature_data import TensorFeatureData
        except ImportError as error:
            raise InputError(
                f"{self.name} needs bmdal-reg ({error}); install it with: pip install bmdal-reg"
            ) from error
        if not hasattr(np, "Inf"):  # bmdal-reg 3.0.2 was written before NumPy 2 dropped this name
            np.Inf = np.inf  # type: ignore[attr-defined]
        points = torch.from_numpy(request.points)
        models: list[nn.Module] = [nn.Identity()]
        if self._on_gradients:
            models = [_network(points, request)]
        with torch_seeded(request.generator):
            chosen, _ = select_batch(
                batch_size=request.count,
                models=models,
                data={
                    "train": TensorFeatureData(points[request.known]),
                    "pool": TensorFeatureData(points[request.open]),
                },
                y_train=None,
                base_kernel="grad" if self._on_gradients else "linear",
                kernel_transforms=[("rp", [SKETCH])] if self._on_gradients else [],
                selection_method="lcmd",
                sel_with_train=True,
            )
        return explained(request, request.open[chosen.numpy()].tolist())


def _network(points: torch.Tensor, request: AcquisitionRequest) -> nn.Module:
    """A network of the labels' logarithms, standardised, as their method wants one."""
    if request.log_values is None:
        raise InputError("a network of the peer needs the labels' values")
    known = np.isfinite(request.log_values)
    rows = torch.from_numpy(request.labelled[known])
    values = torch.from_numpy(request.log_values[known]).float()
    values = (values - values.mean()) / values.std().clamp(min=1e-6)
    with torch_seeded(request.generator):
        network = nn.Sequential(
            nn.Linear(points.shape[1], WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, 1),
        )
        optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
        for _ in range(EPOCHS):
            optimizer.zero_grad()
            loss: Any = ((network(points[rows])[:, 0] - values) ** 2).mean()
            loss.backward()
            optimizer.step()
    return network


PEERS = (BmdalLcmd(on_gradients=False), BmdalLcmd(on_gradients=True))


def check_installed(strategies: Collection[str]) -> None:
    """Raises InputError where a peer is among the strategies, and what it needs is missing."""
    wanted = [peer.name for peer in PEERS if peer.name in strategies]
    if wanted and find_spec("bmdal_reg") is None:
        raise InputError(
            f"{', '.join(wanted)}: this needs bmdal-reg, which is not installed; leave it out, "
            "or install it with: pip install bmdal-reg"
        )
