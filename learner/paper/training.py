"""Training loop of every network: a number of steps, ended early by held-out architectures.

An epoch of twenty graphs is a single step, so steps are counted, and the learning rate falls to
zero over them along half a cosine. Held-out losses are few and noisy, so training ends only where
they are significantly worse: by more than two standard errors of the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from trappm.learner.interface import Array
from trappm.learner.paper.graphs import batches
from trappm.profiler.records import OnProgress

# Round numbers, all four.
CHECK_EVERY = 20
"""Steps between two evaluations of the held-out graphs."""
PATIENCE = 10
"""Evaluations in a row that are significantly worse than the best before training ends."""
PARTS = 16
"""Parts of the held-out graphs, from whose losses the standard error follows."""
STANDARD_ERRORS = 2.0


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
    """Train a network in place, then freeze it.

    Args:
        network: Network to train.
        loss: Loss of a batch.
        data: Graphs to learn from, shuffled for each round of batches.
        held_out: Graphs of other architectures, which end the training.
        steps: Largest number of steps.
        learning_rate: First learning rate of AdamW.
        weight_decay: Decoupled weight decay (Loshchilov and Hutter 2019).
        batch_nodes: Number of nodes at which a batch is full.
        generator: Shuffles the data.
        on_step: Called with the number of steps done and the largest number of steps.
    """
    part_nodes = min(batch_nodes, _nodes(held_out) // PARTS)
    parts = list(batches(held_out, part_nodes, range(len(held_out))))
    drawn = _endless(data, batch_nodes, generator)
    optimizer = torch.optim.AdamW(network.parameters(), lr=learning_rate, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    best, checkpoint, worse = _losses(network, loss, parts), _state(network), 0
    for step in range(1, steps + 1):
        network.train()
        optimizer.zero_grad()
        loss(next(drawn)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if step % CHECK_EVERY and step != steps:
            continue
        on_step(step, steps)
        now = _losses(network, loss, parts)
        if is_significantly_worse(now, best):
            worse += 1
        else:
            checkpoint, worse = _state(network), 0
        if now.mean() < best.mean():
            best = now
        if worse == PATIENCE:
            break
    network.load_state_dict({**network.state_dict(), **checkpoint})
    network.eval().requires_grad_(False)
    on_step(steps, steps)  # steps that were not needed count as done


def is_significantly_worse(now: Array, best: Array) -> bool:
    """Return whether losses of k parts exceed the best ones by more than the standard errors."""
    gaps = now - best
    error = gaps.std(ddof=1) / len(gaps) ** 0.5 if len(gaps) > 1 else 0.0
    return not gaps.mean() <= STANDARD_ERRORS * error  # NaN is worse than anything


def _endless(
    data: Sequence[Data], batch_nodes: int, generator: np.random.Generator
) -> Iterator[Batch]:
    # Data that fits into one batch is joined once.
    is_one_batch = _nodes(data) <= batch_nodes
    fixed = list(batches(data, batch_nodes, range(len(data)))) if is_one_batch else []
    while True:
        yield from fixed or batches(data, batch_nodes, generator.permutation(len(data)).tolist())


def _nodes(data: Sequence[Data]) -> int:
    return sum(int(d.x.shape[0]) for d in data)


def _losses(network: nn.Module, loss: Callable[[Batch], Tensor], parts: Sequence[Batch]) -> Array:
    """Return the loss of each part (k), with the same random draws at every evaluation."""
    network.eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return np.array([loss(part).item() for part in parts])


def _state(network: nn.Module) -> dict[str, Tensor]:
    """Return a copy of all that training changes; frozen weights are left out."""
    weights = network.named_parameters(remove_duplicate=False)
    frozen = {name for name, weight in weights if not weight.requires_grad}
    state = network.state_dict()
    return {name: value.clone() for name, value in state.items() if name not in frozen}


@contextmanager
def seed_torch(generator: np.random.Generator) -> Iterator[None]:
    """Seed torch's global generator inside the block, and restore its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(generator.integers(2**63)))
        yield
