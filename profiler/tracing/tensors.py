"""Facts about tensors of a step that several logs need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

HALVES = frozenset((torch.float16, torch.bfloat16))


def in_backward() -> bool:
    """Return whether autograd runs; a model may run it within its own forward pass."""
    return torch._C._current_graph_task_id() >= 0


def tensors_of(values: Any) -> list[Tensor]:
    """Return the tensors among these values, and in the lists among them, in order."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += tensors_of(value)
    return tensors


def channels_last(tensor: Tensor) -> bool:
    """Return whether all of these are images whose channels lie next to each other."""
    return (
        tensor.dim() == 4
        and not tensor.is_contiguous()
        and tensor.is_contiguous(memory_format=torch.channels_last)
    )


def bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(elements_of(t) * t.element_size() for t in tensors)


def elements_of(tensor: Tensor) -> int:
    """Return the number of different elements; an expanded axis repeats them."""
    count = tensor.numel()
    if count and not tensor.is_contiguous():
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            if stride == 0:
                count //= size
    return count
