"""The loss of a training step, where nobody names one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils._pytree import tree_leaves

from trappm.profiler.errors import UnsupportedModelError

Loss = Callable[[Any, Any], Tensor]
"""Of what a model returns, and of what it was called with, as (args, kwargs)."""


def default_loss(output: Any, inputs: Any) -> Tensor:
    """The model's own loss; else cross-entropy of class scores; else the mean of all outputs.

    A model's own is `output.loss`, `output["loss"]`, or the sum of a dictionary of scalars, as
    torchvision's detectors give it. Scores are (B, classes), those of a distilled model two such,
    or (B, T, classes) of a model of integer tokens (B, T).

    Raises:
        UnsupportedModelError: no output depends on a trainable parameter.
    """
    own = _own(output)
    if own is not None:
        return own
    parts = [t for t in tree_leaves(_plain(output)) if isinstance(t, Tensor) and t.requires_grad]
    if not parts:
        raise UnsupportedModelError("no output depends on a trainable parameter")
    tokens = [t for t in tree_leaves(inputs) if isinstance(t, Tensor) and _is_tokens(t)]
    return torch.stack([_of_scores(part, tokens) for part in parts]).sum()


def _own(output: Any) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    if isinstance(output, Mapping) and output:
        values = list(output.values())
        if all(isinstance(v, Tensor) and v.dim() == 0 for v in values):
            return torch.stack(values).sum()
    scalar = isinstance(output, Tensor) and output.dim() == 0 and output.requires_grad
    return output if scalar else None


def _plain(output: Any) -> Any:
    """Hugging Face's outputs are mappings that not every version of pytree looks into."""
    return dict(output) if isinstance(output, Mapping) else output


def _is_tokens(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and not tensor.is_floating_point() and tensor.dtype != torch.bool


def _of_scores(scores: Tensor, tokens: list[Tensor]) -> Tensor:
    if scores.dim() == 2:
        return F.cross_entropy(scores, _classes(scores.shape[0]))
    if scores.dim() == 3 and any(scores.shape[:2] == t.shape for t in tokens):
        flat = scores.flatten(0, 1)
        return F.cross_entropy(flat, _classes(flat.shape[0]))
    return scores.mean()


def _classes(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.long, device="meta")
