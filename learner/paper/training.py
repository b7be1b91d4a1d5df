"""How every network here is trained: by steps, as long as architectures held out gain by it.

Epochs say nothing of how far a training has come: of twenty graphs, which fit into one batch, an
epoch is a single step. So steps are counted, and the step size falls to zero over them along a half
cosine, so that the end does not depend on the luck of the last batch. Whether so many are too many
is asked of graphs that no step has seen. These are few, and the least of many noisy errors comes
too early, so later weights stand unless they are surely worse: by more than two standard errors of
the difference (of one, as trees are pruned, a bad draw of what is held out still ended training).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from trappm.learner.paper.graphs import batches
from trappm.profiler.progress import OnProgress

LOOK_EVERY = 20
"""Steps between two looks at what is held out."""
PATIENCE = 10
"""Looks in a row that are surely worse than the best before training ends."""
PARTS = 16
"""Of what is held out, whose losses tell how sure a difference is."""
SURE = 2.0
"""Standard errors. Round numbers, all four."""


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
    part_nodes = min(batch_nodes, _nodes(held_out) // PARTS)
    judged_by = list(batches(held_out, part_nodes, range(len(held_out))))
    drawn = _endless(data, batch_nodes, generator)
    optimizer = torch.optim.AdamW(network.parameters(), lr=learning_rate, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    best, kept, worse = _losses(network, loss, judged_by), _state(network), 0
    for step in range(1, steps + 1):
        network.train()
        optimizer.zero_grad()
        loss(next(drawn)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if step % LOOK_EVERY and step != steps:
            continue
        on_step(step, steps)
        now = _losses(network, loss, judged_by)
        if surely_worse(now, best):
            worse += 1
        else:
            kept, worse = _state(network), 0
        if now.mean() < best.mean():
            best = now
        if worse == PATIENCE:
            break
    network.load_state_dict({**network.state_dict(), **kept})  # what is frozen is as it was
    network.eval().requires_grad_(False)
    on_step(steps, steps)  # those that were not needed count as done


def surely_worse(now: npt.NDArray[np.float64], best: npt.NDArray[np.float64]) -> bool:
    """Whether losses of k parts lie above others by more than `SURE` standard errors of that."""
    gaps = now - best
    error = gaps.std(ddof=1) / len(gaps) ** 0.5 if len(gaps) > 1 else 0.0
    # What is no number is worse than anything.
    return not gaps.mean() <= SURE * error


def _endless(
    data: Sequence[Data], batch_nodes: int, generator: np.random.Generator
) -> Iterator[Batch]:
    # What fits into one batch is put together once.
    whole = _nodes(data) <= batch_nodes
    fixed = list(batches(data, batch_nodes, range(len(data)))) if whole else []
    while True:
        yield from fixed or batches(data, batch_nodes, generator.permutation(len(data)).tolist())


def _nodes(data: Sequence[Data]) -> int:
    return sum(int(d.x.shape[0]) for d in data)


def _losses(
    network: nn.Module, loss: Callable[[Batch], Tensor], parts: Sequence[Batch]
) -> npt.NDArray[np.float64]:
    """The loss of each part (k), with the same draws at every look."""
    network.eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return np.array([loss(part).item() for part in parts])


def _state(network: nn.Module) -> dict[str, Tensor]:
    """All that training changes: frozen weights, such as a language model's, are not copied."""
    weights = network.named_parameters(remove_duplicate=False)
    frozen = {name for name, weight in weights if not weight.requires_grad}
    state = network.state_dict()
    return {name: value.clone() for name, value in state.items() if name not in frozen}


@contextmanager
def torch_seeded(generator: np.random.Generator) -> Iterator[None]:
    """Inside, torch's global generator starts from a seed drawn from `generator`.

    The state from before comes back at the end, so that training changes no other random numbers.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(generator.integers(2**63)))
        yield
