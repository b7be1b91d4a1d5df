"""Image classifiers without a name in timm; each function returns one."""

from __future__ import annotations

import torch
from torch import nn


def plain_net(width: int = 16) -> nn.Module:
    """Return a small convolutional network for images of any size."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )


def wide_net() -> nn.Module:
    """Return the same network with four times the channels."""
    return plain_net(width=64)


class Mixer(nn.Module):
    """Network of patches, which is built for one size of images."""

    def __init__(self, input_size: int, patch: int = 8, width: int = 64) -> None:
        super().__init__()
        count = (input_size // patch) ** 2
        drop_rates = [rate.item() for rate in torch.linspace(0, 0.1, 2)]
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.tokens = nn.ModuleList(nn.Linear(count, count) for _ in drop_rates)
        self.drops = nn.ModuleList(map(nn.Dropout, drop_rates))
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2)
        for mix, drop in zip(self.tokens, self.drops, strict=True):
            x = x + drop(mix(x).relu())
        return self.head(x.mean(-1))
