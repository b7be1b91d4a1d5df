"""Losses of training steps: the default one, and those of a caller with their targets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trappm.profiler.errors import InputError, UnsupportedModelError
from trappm.profiler.models.model_input import TARGETS
from trappm.profiler.models.on_meta import on_meta

Loss = Callable[[Any, Any], Tensor]
"""Called with the model's output and its inputs as (args, kwargs)."""

_OF_CLASSES = ("CrossEntropyLoss", "NLLLoss", "cross_entropy", "nll_loss")
"""Losses of torch for scores (B, classes, ...) and class numbers (B, ...)."""
_OF_VALUES = (
    "BCELoss", "BCEWithLogitsLoss", "HuberLoss", "L1Loss", "MSELoss", "SmoothL1Loss",
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "huber_loss", "l1_loss",
    "mse_loss", "smooth_l1_loss",
)  # fmt: skip
"""Losses of torch whose targets have the shape and type of the output."""


def loss_of(loss: object, *, has_targets: bool) -> Loss:
    """Return the loss of a step from the argument of a caller.

    Args:
        loss: None for the default; or called with the output, and with the targets if there are
            any. A loss of `torch.nn` without targets gets some of the right shape.
        has_targets: Whether the inputs have targets.

    Raises:
        InputError: It is not a loss, or needs targets that are missing.
    """
    if loss is None:
        return default_loss
    if isinstance(loss, type) or not callable(loss):
        name = getattr(loss, "__name__", repr(loss))
        raise InputError(
            f"loss is {name}; give a function or an object, such as "
            "loss=torch.nn.CrossEntropyLoss()"
        )
    kind = type(loss).__name__
    if not isinstance(loss, nn.Module):
        kind = getattr(loss, "__name__", kind)
    called = on_meta(loss, None) if isinstance(loss, nn.Module) else loss
    needed = _count_arguments(loss)
    if has_targets:
        if needed is not None and not _takes(loss, 2):
            raise InputError(
                f"the loss {kind} does not take output and targets; with targets=labels give a "
                "loss of both, such as loss=lambda output, targets: ..."
            )
        return lambda output, inputs: called(output, inputs[1][TARGETS])
    if needed is None or needed < 2:
        return lambda output, _: called(output)
    if needed > 2 or kind not in (*_OF_CLASSES, *_OF_VALUES):
        raise InputError(f"the loss {kind} needs targets; give targets=labels, loss=loss)")
    return lambda output, _: called(output, _make_targets(kind, output))


def _count_arguments(loss: object) -> int | None:
    """Return the number of arguments that a loss needs; None where Python cannot say."""
    try:
        parameters = _signature(loss).parameters.values()
    except (TypeError, ValueError):
        return None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is p.empty for p in parameters)


def _takes(loss: object, count: int) -> bool:
    """Return whether a loss can be called with this number of arguments."""
    try:
        _signature(loss).bind(*range(count))
    except TypeError:
        return False
    return True


def _signature(loss: Any) -> inspect.Signature:
    return inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)


def _make_targets(kind: str, output: Any) -> Tensor:
    """Return targets of a loss of torch, of the shape that the output asks for."""
    if not isinstance(output, Tensor):
        raise InputError(
            f"the loss {kind} takes a tensor, but the model returns a {type(output).__name__}; "
            "give a loss such as loss=lambda output: output['loss']"
        )
    if kind in _OF_VALUES:
        return torch.empty_like(output, requires_grad=False)
    return torch.empty(
        (*output.shape[:1], *output.shape[2:]), dtype=torch.long, device=output.device
    )


def default_loss(output: Any, inputs: Any) -> Tensor:
    """Return the model's own loss, else cross-entropy of class scores, else the mean output.

    A model's own loss is `output.loss`, `output["loss"]`, or the sum of a dictionary of scalars, as
    of torchvision's detectors. Scores are (B, classes), two such of a distilled model, or (B, T,
    classes) of a model of tokens (B, T). Integer targets are classes; for others the loss is the
    mean squared error.

    Raises:
        UnsupportedModelError: No output depends on a trainable parameter.
        InputError: The targets fit no output.
    """
    own = _loss_of_output(output)
    if own is not None:
        return own
    parts = [t for t in tree_leaves(_plain(output)) if isinstance(t, Tensor) and t.requires_grad]
    if not parts:
        raise UnsupportedModelError("no output depends on a trainable parameter")
    if TARGETS in inputs[1]:
        return torch.stack([_against(part, inputs[1][TARGETS]) for part in parts]).sum()
    tokens = [t for t in tree_leaves(inputs) if isinstance(t, Tensor) and _is_tokens(t)]
    return torch.stack([_of_scores(part, tokens) for part in parts]).sum()


def _loss_of_output(output: Any) -> Tensor | None:
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
    """Return a mapping as a dictionary, which every version of pytree opens."""
    return dict(output) if isinstance(output, Mapping) else output


def _is_tokens(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and not tensor.is_floating_point() and tensor.dtype != torch.bool


def _against(output: Tensor, targets: Any) -> Tensor:
    """Return the loss of one output, by the shape and the type of the targets."""
    if not isinstance(targets, Tensor):
        raise InputError(f"targets are a {type(targets).__name__}; give a tensor, or the loss")
    if targets.is_floating_point() and output.shape == targets.shape:
        return F.mse_loss(output, targets)
    if not targets.is_floating_point() and output.shape[:-1] == targets.shape:
        return F.cross_entropy(output.flatten(0, -2), targets.flatten().long())
    if not targets.is_floating_point() and (
        *output.shape[:1], *output.shape[2:]
    ) == targets.shape:  # fmt: skip
        return F.cross_entropy(output, targets.long())
    raise InputError(
        f"targets of shape {tuple(targets.shape)} are not the classes of an output of shape "
        f"{tuple(output.shape)}, nor its values; give the loss as well, such as "
        "loss=lambda output, targets: ..."
    )


def _of_scores(scores: Tensor, tokens: list[Tensor]) -> Tensor:
    if scores.dim() == 2:
        return F.cross_entropy(scores, _classes(scores.shape[0]))
    if scores.dim() == 3 and any(scores.shape[:2] == t.shape for t in tokens):
        flat = scores.flatten(0, 1)
        return F.cross_entropy(flat, _classes(flat.shape[0]))
    return scores.mean()


def _classes(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.long, device="meta")
