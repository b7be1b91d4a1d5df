"""Torch draws weights, dropout masks and negatives from one global state; this makes it ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def torch_seeded(generator: np.random.Generator) -> Iterator[None]:
    """Inside, torch's global generator starts from a seed drawn from `generator`.

    The state from before comes back at the end, so that training changes no other random numbers.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(generator.integers(2**63)))
        yield
