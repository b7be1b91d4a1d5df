"""Values of whole numbers on the meta device, where a model's code branches on them.

Hugging Face's models ask whether a mask hides anything, and whether positions count without a gap.
Such tensors are small and made of constants and of the caller's masks, so they are computed beside
the trace, on the CPU. Nothing is known of what a weight, a random number or an image went into.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

MAX_ELEMENTS = 1 << 22
"""Of a tensor whose values are followed: masks of a few thousand tokens by as many."""


class KnownValues:
    """The values of those tensors on the meta device that are known."""

    def __init__(self) -> None:
        self._values: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()
        self._lost: set[int] = set()
        """Storages of values in which something unknown was written."""

    def set(self, tensor: Tensor, values: Tensor) -> None:
        self._values[tensor] = values

    def get(self, tensor: Tensor) -> Tensor | None:
        """The values, on the CPU; None if they are not known."""
        values = self._values.get(tensor)
        lost = values is None or values.untyped_storage()._cdata in self._lost
        return None if lost else values

    def number(self, tensor: Tensor) -> bool | int | None:
        """The value of a tensor of one element; None if it is not known."""
        values = self.get(tensor)
        return None if values is None else values.item()  # type: ignore[return-value]

    def follow(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Computes what an operator returned on the meta device, if its arguments are known."""
        if not isinstance(out, Tensor) or not _is_whole(out):
            return
        unknown = False

        def values_of(value: Any) -> Any:
            nonlocal unknown
            if isinstance(value, torch.device):
                return torch.device("cpu")
            if not isinstance(value, Tensor) or not value.is_meta:
                return value
            values = self.get(value)
            unknown = unknown or values is None
            return values

        given, named = tree_map(values_of, (tuple(args), dict(kwargs)))
        if unknown or out.numel() > MAX_ELEMENTS or _is_arbitrary(func):
            known = self._values.get(out)
            if known is not None:
                self._lost.add(known.untyped_storage()._cdata)
            return
        self._values[out] = func(*given, **named)


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def _is_arbitrary(func: Any) -> bool:
    """Whether what an operator returns is random, or whatever was in memory."""
    return torch.Tag.nondeterministic_seeded in func.tags or "empty" in func._schema.name
