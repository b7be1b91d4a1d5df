"""Ordinary gains in the place of those that a fresh model begins with, which are 0 or close to it.

A residual branch often begins with a norm whose weights are 0, or with a layer scale of 1e-6, so
that the network is close to the identity at first. Until training has moved them, what flows back
through the branch is 0 too: three quarters of ResNet-18's gradients are. Multiplying zeros takes
less power than multiplying numbers, and where power is the limit, less time. After a few hundred
steps of a training no model is like that, so we measure none that way.
"""

from __future__ import annotations

import re

import torch
from torch import nn

_TINY = 0.1
"""Gains below this are given a new value; those of trained models are of the order of 1."""

_GAIN = re.compile(r"weight$|gamma|gain|scale|alpha|^ls\d")
"""Names of what multiplies. Biases, tokens and embeddings of positions begin at 0 too, harmlessly:
they are added."""


@torch.no_grad()
def give_ordinary_gains(model: nn.Module) -> None:
    """Sets gains that are all 0, or all the same tiny number, to 1; matrices of zeros to noise."""
    for name, parameter in model.named_parameters():
        if not _GAIN.search(name.rpartition(".")[2]) or parameter.numel() == 0:
            continue
        first = float(parameter.flatten()[0])
        if abs(first) > _TINY or bool((parameter != first).any()):
            continue
        if parameter.ndim > 1 and name.endswith("weight"):
            fan_in = parameter.numel() / parameter.shape[0]
            parameter.normal_(std=fan_in**-0.5)
        else:
            parameter.fill_(1.0)
