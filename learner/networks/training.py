"""How every network here is trained: by steps, until architectures held out are done no better.

Epochs say nothing of how far a training has come: of twenty graphs, which fit into one batch, an
epoch is a single step. So steps are counted, and how many are enough is asked of graphs that no
step has seen. The step size falls each time that they have been done no better for a while, and
training ends when that no longer helps; the weights are those that did them best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from trappm.learner.networks.dataset import batches
from trappm.profiler.progress import OnProgress

LOOK_EVERY = 20
"""Steps between two looks at what is held out."""
PATIENCE = 5
"""Looks without a better one before the step size falls."""
DECAYS = (1.0, 0.3, 0.1)
"""Shares of the first step size, one after the other. Round numbers, all three."""


def train(
    network: nn.Module,
    loss: Callable[[Batch], Tensor],
    data: Sequence[Data],
    held_out: Sequence[Data],
    *,
    steps: int,
    learning_rate: float,
    weight_decay: float,
    batch_nodes: int,
    generator: np.random.Generator,
    on_step: OnProgress = lambda done, total: None,
) -> None:
    """Trains in place, at most so many steps, then freezes the network.

    Args:
        network: from a batch to whatever the loss takes.
        loss: of a batch.
        data: to learn from; drawn anew for each round of batches, unless one batch holds it all.
        held_out: to judge by, whole architectures of which the data has none.
        steps: at most.
        learning_rate: of Adam, at first.
        weight_decay: decoupled (Loshchilov and Hutter 2019).
        batch_nodes: graphs are batched until they have so many nodes together.
        generator: orders the data.
        on_step: called with steps done and steps at most, now and then.
    """
    judged_by = list(batches(held_out, batch_nodes, range(len(held_out))))
    drawn = _endless(data, batch_nodes, generator)
    optimizer = torch.optim.AdamW(network.parameters(), lr=learning_rate, weight_decay=weight_decay)
    best, kept = _judged(network, loss, judged_by), _state(network)
    decays, waited = iter(DECAYS[1:]), 0
    for step in range(1, steps + 1):
        network.train()
        optimizer.zero_grad()
        loss(next(drawn)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % LOOK_EVERY and step != steps:
            continue
        on_step(step, steps)
        judged = _judged(network, loss, judged_by)
        waited += 1
        if judged < best:
            best, kept, waited = judged, _state(network), 0
        if waited == PATIENCE:
            decay = next(decays, None)
            if decay is None:
                break
            network.load_state_dict(kept)
            optimizer.param_groups[0]["lr"] = decay * learning_rate
            waited = 0
    network.load_state_dict(kept)
    network.eval().requires_grad_(False)
    on_step(steps, steps)  # those that were not needed count as done


def _endless(
    data: Sequence[Data], batch_nodes: int, generator: np.random.Generator
) -> Iterator[Batch]:
    # What fits into one batch is put together once.
    whole = sum(int(d.x.shape[0]) for d in data) <= batch_nodes
    fixed = list(batches(data, batch_nodes, range(len(data)))) if whole else []
    while True:
        yield from fixed or batches(data, batch_nodes, generator.permutation(len(data)).tolist())


def _judged(network: nn.Module, loss: Callable[[Batch], Tensor], looked_at: list[Batch]) -> float:
    """The mean loss, with the same draws at every look."""
    network.eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        total: float = sum(loss(batch).item() * batch.num_graphs for batch in looked_at)
    return total / float(sum(batch.num_graphs for batch in looked_at))


def _state(network: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in network.state_dict().items()}
