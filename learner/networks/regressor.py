"""The regressor of the TraPPM paper: the network inside each head.

SAGEConv layers over the nodes, sum pool, the pooled vector joined with the frozen encoder's
embedding and the static features, fully connected layers, a linear output. It predicts logarithms,
in units of a scale that the caller keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch_geometric.data import Batch, Data

from trappm.learner.networks.dataset import batches
from trappm.learner.networks.distinct import DistinctSAGEConv, Dropout, classes_of
from trappm.learner.networks.presets import HeadPreset, Training
from trappm.profiler.graphs.features import NODE_FEATURES, STATIC_FEATURES

HUBER_DELTA = 0.5
"""Errors beyond this many deviations count by their size only, not by their square."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""A number from outputs and targets (k) each."""
OnEpoch = Callable[[int, int], None]
"""Called with epochs done and epochs in all."""


def huber(output: Tensor, target: Tensor) -> Tensor:
    return F.huber_loss(output, target, delta=HUBER_DELTA)


class HeadNetwork(nn.Module):
    """One output column for each metric; `vector` joins embedding and static features."""

    mean_nodes: Tensor

    def __init__(self, preset: HeadPreset, embedding_width: int, outputs: int) -> None:
        super().__init__()
        inputs = (NODE_FEATURES, *preset.widths[:-1])
        self.convolutions = nn.ModuleList(
            DistinctSAGEConv(before, after)
            for before, after in zip(inputs, preset.widths, strict=True)
        )
        self.joined_width = preset.widths[-1] + embedding_width + len(STATIC_FEATURES)
        before_layers = (self.joined_width, *preset.hidden[:-1])
        self.layers = nn.ModuleList(
            nn.Linear(before, after)
            for before, after in zip(before_layers, preset.hidden, strict=True)
        )
        self.output = nn.Linear(preset.hidden[-1], outputs)
        # The network starts as "nothing to add".
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)
        self.dropout = Dropout(preset.dropout)
        self.register_buffer("mean_nodes", torch.ones(()))

    def forward(self, data: Batch) -> Tensor:
        """(graphs, outputs) for a batch of `learner.networks.dataset.to_inputs`."""
        classes = classes_of(data, len(self.convolutions))
        x = classes.rows
        for convolution, layer in zip(self.convolutions, classes.layers, strict=True):
            x = self.dropout(F.relu(convolution(x, layer)))
        # A sum, as in the paper; the constant divisor only brings its magnitude near one.
        pooled = torch.sparse.mm(classes.pool, x) / self.mean_nodes
        joined = torch.cat([pooled, data.vector], dim=1)
        for linear in self.layers:
            joined = self.dropout(F.relu(linear(joined)))
        output: Tensor = self.output(joined)
        return output


def train_network(
    network: nn.Module,
    data: Sequence[Data],
    *,
    training: Training,
    fine_tune: bool,
    generator: np.random.Generator,
    on_epoch: OnEpoch,
    loss: Loss = huber,
) -> None:
    """Trains in place on data with `y` (1, outputs), where NaN is missing; then freezes it.

    The step size falls to zero along a half cosine, so that the end does not depend on the luck
    of the last batch, and no checkpoint needs to be picked.
    """
    epochs, learning_rate = training.epochs, training.learning_rate
    if fine_tune:
        epochs, learning_rate = training.fine_tune_epochs, training.fine_tune_learning_rate
    network.train()
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=learning_rate, weight_decay=training.weight_decay
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(epochs, 1))
    # What fits into one batch is put together once.
    whole = sum(int(d.x.shape[0]) for d in data) <= training.batch_nodes
    fixed = list(batches(data, training.batch_nodes, range(len(data)))) if whole else []
    for epoch in range(epochs):
        order = generator.permutation(len(data)).tolist()
        for batch in fixed or batches(data, training.batch_nodes, order):
            known = ~torch.isnan(batch.y)
            if not known.any():
                continue
            optimizer.zero_grad()
            output = network(batch)
            if output.shape != batch.y.shape:
                raise AssertionError(f"outputs {output.shape} against labels {batch.y.shape}")
            loss(output[known], batch.y[known]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        schedule.step()
        on_epoch(epoch + 1, epochs)
    network.eval().requires_grad_(False)


def last_layer(network: nn.Module, data: Sequence[Data], max_nodes: int) -> npt.NDArray[np.float32]:
    """What the last linear layer of a frozen network sees of these graphs (n, width).

    These are the output's derivatives by that layer's weights.
    """
    seen: list[Tensor] = []
    last = [layer for layer in network.modules() if isinstance(layer, nn.Linear)][-1]
    hook = last.register_forward_pre_hook(lambda _layer, inputs: seen.append(inputs[0]))
    try:
        network_outputs(network, data, max_nodes)
    finally:
        hook.remove()
    return torch.cat(seen).numpy()


def network_outputs(
    network: nn.Module, data: Sequence[Data], max_nodes: int
) -> npt.NDArray[np.float64]:
    """Outputs of a frozen network for these graphs (n, outputs)."""
    with torch.no_grad():
        outputs: list[Any] = [
            network(batch).numpy() for batch in batches(data, max_nodes, range(len(data)))
        ]
    return np.concatenate(outputs).astype(np.float64)
