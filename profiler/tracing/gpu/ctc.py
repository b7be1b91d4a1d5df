"""The CTC loss as a GPU runs it, whose operator the meta device does not have."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from trappm.profiler.traced_step import KernelKind, Pass
from trappm.profiler.tracing.kernel_log import KernelLog


class _Ctc(torch.autograd.Function):
    """Allocates what the loss of Graves et al. (2006) keeps: probabilities of all prefixes."""

    @staticmethod
    def forward(ctx: Any, kernels: KernelLog, log_probs: Tensor, targets: Tensor) -> Tensor:
        steps, batch = log_probs.shape[:2]
        longest = targets.shape[-1] if targets.dim() == 2 else -(-targets.shape[0] // batch)
        prefixes = log_probs.new_empty((batch, steps, 2 * longest + 1))
        losses = log_probs.new_empty(batch)
        kernels.add(KernelKind.OTHER, Pass.FORWARD, [log_probs, targets], [prefixes, losses])
        ctx.kernels = kernels
        ctx.save_for_backward(log_probs, targets, losses, prefixes)
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        log_probs, _, _, prefixes = ctx.saved_tensors
        suffixes = torch.empty_like(prefixes)
        gradients = torch.empty_like(log_probs)
        read = [prefixes, log_probs, gradient]
        ctx.kernels.add(KernelKind.OTHER, Pass.DATA_GRADIENT, read, [suffixes, gradients])
        return None, gradients, None


def ctc_loss(
    kernels: KernelLog,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: object,
    target_lengths: object,
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Any:
    """`ctc_loss` of log probabilities (time, batch, classes) or (time, classes)."""
    batched = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
    losses = cast(Tensor, _Ctc.apply(kernels, batched, targets))  # type: ignore[no-untyped-call]
    if zero_infinity:
        losses = torch.where(losses == float("inf"), torch.zeros_like(losses), losses)
    if reduction in ("mean", 1):
        return losses.mean()
    if reduction in ("sum", 2):
        return losses.sum()
    return losses if log_probs.dim() == 3 else losses.squeeze(0)
